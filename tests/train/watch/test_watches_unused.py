"""Test that unused roles, policies, rules and prompts are reported once, with what occurred."""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from log_events import records

from lightning_jax.models.config import PolicyConfig
from lightning_jax.models.policies import PolicyTable
from lightning_jax.rollouts.results.metrics import to_trajectories
from lightning_jax.traces import attributes
from lightning_jax.traces.config import RewardRule, RoleConfig
from lightning_jax.traces.store import Store
from lightning_jax.traces.trajectories import TraceReader
from lightning_jax.train.watch.findings import unused_names
from lightning_jax.train.watch.report import learning_table
from lightning_jax.train.watch.watches import UnusedWatch
from lightning_jax.types import Rollout, Span

READER = TraceReader(
    roles={"planner": RoleConfig(agent="plan*"), "judge": RoleConfig(model="judge-*")},
    policies=PolicyTable.of({"one": PolicyConfig(), "two": PolicyConfig()}),
    rules={
        "late": RewardRule("tool_timeout", -1.0),
        "polite": RewardRule("response", 0.1, pattern="please"),
        "short": RewardRule("response", 0.1, pattern="[0-9]", agent="writer"),
        "any": RewardRule("response", 0.1, pattern="[0-9]"),
    },
    decode=str,
)
CALL = {
    attributes.OPERATION_NAME: attributes.CHAT,
    attributes.POLICY: "gpt-4o",
    attributes.AGENT: "planner",
    attributes.ROLE: "planner",
    attributes.ANSWERED_BY: "one",
    attributes.PROMPT_TOKEN_IDS: (1, 2),
    attributes.RESPONSE_TOKEN_IDS: (3,),
    attributes.BEHAVIOR_LOGPROBS: (-0.1,),
    attributes.SAMPLING_LOGPROBS: (-0.1,),
    attributes.POLICY_VERSIONS: (0,),
    attributes.RESPONSE_FINISH_REASONS: ("stop",),
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(Store(tmp_path / "store.sqlite")) as opened:
        opened.add_span("r0", Span("t", "1", None, "chat gpt-4o", 0, 1, CALL))
        yield opened


def test_each_name_is_reported_once(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    rollouts = [Rollout("r0", "t", "g", "train", 0, 0, 1, "scored", 1.0)]
    _, metrics = to_trajectories(store, rollouts, policy_version=0, reader=READER)
    unused = [("rule", "late"), ("rule", "polite"), ("rule", "short")]
    unused += [("role", "judge"), ("policy", "two")]
    assert unused_names([metrics]) == unused
    watch = UnusedWatch(READER, store)
    for step in range(2):
        watch.after_rollouts(step, rollouts, metrics)
    texts = {record.unused: record.getMessage() for record in records(caplog, "unused_name")}
    assert len(texts) == len(records(caplog, "unused_name")) == 5
    for name in ("judge", "two"):
        assert "gpt-4o" in texts[name] and "planner" in texts[name]
    assert "no tool_timeout" in texts["late"] and "planner" in texts["short"]
    assert "(3,)" in texts["polite"]


def test_frozen_roles_may_match_nothing_where_another_takes_the_rest(store: Store) -> None:
    rollouts = [Rollout("r0", "t", "g", "train", 0, 0, 1, "scored", 1.0)]
    roles = {
        "title": RoleConfig(system="^Write a title", trains=False),
        "planner": RoleConfig(agent="planner"),
    }
    rest = {"side": RoleConfig(model="*", trains=False)}
    for settings, unused in ((roles, ["title"]), (roles | rest, [])):
        reader = TraceReader(roles=settings)
        _, metrics = to_trajectories(store, rollouts, policy_version=0, reader=reader)
        assert unused_names([metrics]) == [("role", name) for name in unused]


def test_the_summary_names_what_matched_in_no_step() -> None:
    steps = [
        {
            "rollout/num_calls": 1.0,
            "rollout/num_rollouts/role=a": float(step),
            "rollout/rule_b": 0.0,
        }
        for step in range(2)
    ]
    assert unused_names(steps) == [("rule", "b")]
    rows = [row | {"rollout/num_rollouts": 1.0, "train/num_updates": 1.0} for row in steps]
    assert learning_table(rows).startswith("rule b ")
    assert unused_names([{"rollout/num_calls": 0.0, "rollout/rule_b": 0.0}]) == []


def test_a_prompt_that_no_call_has_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = {1: "<|user|>Use this\n{schema}.", 2: "Be  short.\n", 3: "4: Count apples"}
    reader = TraceReader(decode=lambda ids: "".join(texts[i] for i in ids))
    prompts = {
        "asks": "Be brief.",
        "ask": "Be short.",
        "task": "{number}: Count {things}",
        "whole": "Use this {{schema}}.",
    }
    root = {attributes.PROMPTS: json.dumps(prompts)}
    rollouts = [Rollout(f"r{i}", "t", "g", "train", 0, 0, 1, "scored", 1.0) for i in range(2)]
    with closing(Store(tmp_path / "prompts.sqlite")) as store:
        for rollout, ids in zip(rollouts, ((1, 2), (3,)), strict=True):
            call = CALL | {attributes.PROMPT_TOKEN_IDS: ids}
            name = rollout.rollout_id
            store.add_span(name, Span("t", f"{name}1", f"{name}0", "chat", 0, 1, call))
            store.add_span(name, Span("t", f"{name}0", None, "rollout", 0, 1, root))
        watch = UnusedWatch(reader, store, has_prompts=True)
        watch.after_rollouts(0, [], {})
        for step in range(1, 3):
            watch.after_rollouts(step, rollouts, {})
    (record,) = records(caplog, "unused_name")
    assert (record.kind, record.unused, record.step) == ("prompt", "asks", 1)
    assert "none of 2 calls" in record.getMessage()


def test_prompts_are_not_looked_for_without_any(store: Store) -> None:
    watch = UnusedWatch(TraceReader(decode=_no_decode), store)
    watch.after_rollouts(0, [Rollout("r0", "t", "g", "train", 0, 0, 1, "scored", 1.0)], {})


def _no_decode(ids: Sequence[int]) -> str:
    raise AssertionError("nothing needs a text")
