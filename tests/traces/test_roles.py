"""Tests that roles decide which calls train. The others are part of the environment."""

from dataclasses import replace
from typing import Any

import pytest

from lightning_jax.models.policies import Policy, PolicyTable
from lightning_jax.settings import ConfigError, load_config
from lightning_jax.testing.records import trajectory, transition
from lightning_jax.traces import attributes
from lightning_jax.traces.config import RewardRule, RoleConfig
from lightning_jax.traces.roles import assign_roles, find_role, only_trained
from lightning_jax.train.config import Config
from lightning_jax.types import Span

FROZEN = RoleConfig(agent="check*", trains=False, served_by="initial")
ROLES = {
    "checker": FROZEN,
    "judge": RoleConfig(model="gpt-*", trains=False, served_by="http://127.0.0.1:1/v1"),
    "exact": RoleConfig(model="mine"),
    "planner": RoleConfig(system=r"(?i)you plan\b", trains=False),
    "writer": RoleConfig(agent="writer", system="SQL"),
    "summary": RoleConfig(message=r"^Summarize the conversation", trains=False),
}


@pytest.mark.parametrize(
    ("agent", "model", "system", "role"),
    [
        ("checker-2", "policy", "", "checker"),
        ("", "gpt-5-nano", "", "judge"),
        ("", "mine", "", "exact"),
        ("", "mine:latest", "", "exact"),  # as Ollama's clients send it
        ("x", "policy", "Today You plan.", "planner"),
        ("x", "policy", "You planned.", ""),
        ("writer", "policy", "You write SQL.", "writer"),
        ("writer", "policy", "You write.", ""),
        ("checker", "gpt-4", "you plan", "checker"),
    ],
)
def test_a_call_has_the_first_role_that_fits(
    agent: str, model: str, system: str, role: str
) -> None:
    found = find_role(ROLES, agent=agent, model=model, system=system, message="Hello")
    assert found == role


def test_role_is_told_by_the_users_last_message() -> None:
    call = {"agent": "", "model": "policy", "system": ""}
    assert find_role(ROLES, **call, message="Summarize the conversation so far.") == "summary"
    assert find_role(ROLES, **call, message="Do not: Summarize the conversation.") == ""


def _span(call_id: str, parent: str | None = None, **attributes: Any) -> Span:
    return Span("t", call_id, parent, "x", 0, 1, attributes)


def test_the_tree_may_keep_a_call_from_training() -> None:
    at_first: dict[str, Any] = {attributes.TRAINS: True}
    spans = [
        _span("node", **{"graph.node.id": "checker"}),
        _span("below", "node", **at_first),
        _span("exact", "node", **at_first, **{attributes.ROLE: "exact"}),
        _span("proxied", "node", **at_first | {attributes.ROLE: "judge", attributes.TRAINS: False}),
        _span("alone", **at_first),
    ]
    calls = [replace(transition([1], [2]), call_id=span.span_id) for span in spans[1:]]
    below, exact, proxied, alone = assign_roles(spans, calls, ROLES)
    assert (below.agent, below.role, below.trains) == ("checker", "checker", False)
    assert (exact.role, exact.trains) == ("checker", False)
    assert (proxied.role, proxied.trains) == ("judge", False)  # who answered it cannot change
    assert (alone.agent, alone.role, alone.trains) == ("", "", True)
    (plain, *_) = assign_roles(spans, calls, {})
    assert plain.trains and plain.agent == "checker"


def test_the_stored_route_counts_whatever_the_settings_are_now() -> None:
    names: dict[str, Any] = {attributes.AGENT: "checker", attributes.ROLE: "exact"}
    spans = [
        _span(str(trains), None, **names, **{attributes.TRAINS: trains}) for trains in (True, False)
    ]
    calls = [replace(transition([1], [2]), call_id=span.span_id, agent="checker") for span in spans]
    assert [call.trains for call in assign_roles(spans, calls, ROLES)] == [True, False]
    assert [call.role for call in assign_roles(spans, calls, {})] == ["exact", "exact"]


def test_calls_of_an_older_store_train_as_the_settings_say() -> None:
    spans = [_span(role, **{attributes.ROLE: role}) for role in ("", "exact", "planner")]
    calls = [
        replace(transition([1], [2]), call_id=span.span_id, answered_by="writer") for span in spans
    ]
    found = assign_roles(spans, calls, ROLES, PolicyTable((Policy("writer"),)))
    assert [call.trains for call in found] == [True, True, False]
    found = assign_roles(spans, calls, ROLES, PolicyTable((Policy("writer", trains=False),)))
    assert not any(call.trains for call in found)


def test_what_a_frozen_call_earned_goes_to_the_trained_call_before_it() -> None:
    def call(name: int, reward: float, trains: bool):
        return replace(transition([name], [name], reward=reward), trains=trains)

    whole = trajectory(
        call(1, 1.0, False),
        call(2, 2.0, True),
        call(3, 4.0, False),
        call(4, 8.0, False),
        call(5, 16.0, True),
        reward=32.0,
    )
    kept = only_trained(whole)
    assert [(c.prompt_token_ids, c.reward) for c in kept.transitions] == [
        ((2,), 1.0 + 2.0 + 4.0 + 8.0),
        ((5,), 16.0),
    ]
    assert kept.reward == 32.0
    assert only_trained(kept) == kept
    assert only_trained(trajectory(call(1, 1.0, False))).transitions == ()


def test_roles_and_rules_are_read_from_settings() -> None:
    config = load_config(
        Config,
        [
            "roles.checker.agent=checker",
            "roles.checker.trains=false",
            "reward_rules.bad_sql={fact: observation, pattern: '^Error', reward: -0.2}",
        ],
    )
    assert config.roles == {"checker": RoleConfig(agent="checker", trains=False)}
    assert config.reward_rules == {"bad_sql": RewardRule("observation", -0.2, "^Error")}


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ("roles.a.trains=false", ("roles.a.agent", "None")),
        ("roles.a={agent: x, served_by: initial}", ("roles.a.trains", "True")),
        (
            "roles.a={agent: x, trains: false, served_by: ftp://x}",
            ("roles.a.served_by", "ftp://x"),
        ),
        ("roles.a={system: '('}", ("roles.a.system", "'('")),
        ("reward_rules.a={fact: luck, reward: 1}", ("reward_rules.a.fact", "'luck'")),
        (
            "reward_rules.a={fact: response, reward: 1}",
            ("reward_rules.a.pattern", "None", "response"),
        ),
        (
            "reward_rules.a={fact: cut_short, reward: .nan}",
            ("reward_rules.a.reward", "nan"),
        ),
        ("reward_rules.a={fact: cut_short}", ("reward_rules.a.reward",)),
    ],
)
def test_a_wrong_role_or_rule_is_one_sentence(setting: str, names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(Config, [setting])
    assert all(name in str(caught.value) for name in names)
    assert "\n" not in str(caught.value)
