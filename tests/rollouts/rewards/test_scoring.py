"""Tests of scoring by functions and judges: a real server answers, and the store keeps all."""

import asyncio
import contextlib
import json
import math
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from remote_server import RemoteServer, serving

from lightning_jax.rollouts.config import JudgeConfig, RewardConfig, RolloutConfig
from lightning_jax.rollouts.rewards.chat import missing_v1
from lightning_jax.rollouts.rewards.components import Attempt
from lightning_jax.rollouts.rewards.judge import Endpoint, Judge
from lightning_jax.rollouts.rewards.scoring import RewardScorer
from lightning_jax.traces import attributes
from lightning_jax.traces.store import Store
from lightning_jax.types import Rollout, Span, Task

TASK: Task = {"id": "t", "question": "Say a digit."}
LIMITS = RolloutConfig(max_attempts=3, retry_delay_s=0.0, call_timeout_s=5.0)
RUBRIC = """
criteria:
  big: {text: Big, weight: 1, scale: [0, 9]}
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path / "store.sqlite")
    yield opened
    opened.close()


def _finished(store: Store, responses: Sequence[str], phase: str = "train") -> list[Rollout]:
    """Store a scored rollout of one call for each response."""
    rollouts = []
    for index, text in enumerate(responses):
        rollout = Rollout(f"{phase}-{index}", "t", f"{phase}-g", phase, 0, index, 1, "queued")
        store.add_rollout(rollout, TASK)
        store.set_status(rollout.rollout_id, "running")
        ids = tuple(map(ord, text))
        values: dict[str, Any] = {
            attributes.OPERATION_NAME: attributes.CHAT,
            attributes.POLICY: "policy",
            attributes.PROMPT_TOKEN_IDS: tuple(map(ord, "Say a digit.")),
            attributes.RESPONSE_TOKEN_IDS: ids,
            attributes.BEHAVIOR_LOGPROBS: (-1.0,) * len(ids),
            attributes.SAMPLING_LOGPROBS: (-1.0,) * len(ids),
            attributes.POLICY_VERSIONS: (0,) * len(ids),
            attributes.RESPONSE_FINISH_REASONS: ("stop",),
        }
        store.add_span(rollout.rollout_id, Span("t", f"c{index}", None, "chat", 1, 2, values))
        store.set_status(rollout.rollout_id, "scored", reward=0.25)
        rollouts.append(store.rollout(rollout.rollout_id))
    return rollouts


def _decode(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def _scorer(
    store: Store,
    rewards: dict[str, RewardConfig],
    server: RemoteServer | None = None,
    limits: RolloutConfig = LIMITS,
) -> RewardScorer:
    judges = {
        name: Judge(
            reward.judge,
            Endpoint(server.url, "judge", "sk-1", timeout_s=limits.call_timeout_s),
            store,
            limits,
            seed=0,
        )
        for name, reward in rewards.items()
        if reward.judge and server
    }
    return RewardScorer(rewards, judges, store, _decode, limits)


def _score(scorer: RewardScorer, rollouts: Sequence[Rollout]) -> list[Rollout]:
    return asyncio.run(scorer.score(TASK, rollouts))


def _judge(server: RemoteServer, **settings: Any) -> RewardConfig:
    return RewardConfig(judge=JudgeConfig(served_by=server.url, served_model="judge", **settings))


def _by_digit(text: str) -> str:
    """Return the verdict of a judge that scores each attempt by the digit in it."""
    entries = json.loads(text)["attempts"].items()
    scores = {key: {"reason": f"it is {said[-1]}", "score": int(said[-1])} for key, said in entries}
    return json.dumps(scores)


def test_functions_of_one_rollout_and_of_the_group_are_summed_and_stored(store: Store) -> None:
    def digit(task: Task, attempt: Attempt) -> float:
        assert task == TASK
        return float(attempt.response)

    async def best(task: Task, attempts: list[Attempt]) -> list[float]:
        top = max(float(attempt.response) for attempt in attempts)
        return [float(float(attempt.response) == top) for attempt in attempts]

    rewards = {
        "agent": RewardConfig(weight=2.0),
        "digit": RewardConfig(weight=0.0, function=digit),
        "best": RewardConfig(group=best),
    }
    scored = _score(_scorer(store, rewards), _finished(store, "273"))
    assert [rollout.reward for rollout in scored] == [0.5, 1.5, 0.5]
    assert scored[1].components == {"agent": 0.25, "digit": 7.0, "best": 1.0}
    assert [store.rollout(rollout.rollout_id) for rollout in scored] == scored
    # An evaluation has no group to compare, and what has no weight is only shown.
    (alone,) = _score(_scorer(store, rewards), _finished(store, "4", phase="eval"))
    assert (alone.reward, alone.components) == (0.5, {"agent": 0.25, "digit": 4.0})


def test_a_component_that_only_helps_training_fails_no_evaluation(store: Store) -> None:
    def partial(task: Task, attempt: Attempt) -> float:
        return 0.5 if attempt.response == "2" else math.nan

    rewards = {
        "agent": RewardConfig(),
        "partial": RewardConfig(function=partial, in_evaluations=False),
    }
    trained = _score(_scorer(store, rewards), _finished(store, "23"))
    assert [(r.status, r.reward) for r in trained] == [("scored", 0.75), ("agent_failure", None)]
    right, odd = _score(_scorer(store, rewards), _finished(store, "23", phase="sampled"))
    assert (right.reward, right.components) == (0.25, {"agent": 0.25, "partial": 0.5})
    assert (odd.status, odd.reward, odd.components) == ("scored", 0.25, {"agent": 0.25})


def test_stored_components_are_taken_over(store: Store) -> None:
    calls = []

    def count(task: Task, attempt: Attempt) -> float:
        calls.append(attempt.rollout_id)
        return attempt.reward + 1

    scorer = _scorer(store, {"count": RewardConfig(function=count)})
    scored = _score(scorer, _finished(store, "12"))
    assert _score(scorer, scored) == scored and len(calls) == 2
    # A group that a crash left half scored is scored again, from what the agent returned.
    half = [scored[0], replace(scored[1], components={}, reward=0.25)]
    assert [r.reward for r in _score(scorer, half)] == [1.25, 1.25]
    store.forget_scores(1)
    assert store.rollout("train-0") == scored[0]
    store.forget_scores(0)
    assert [store.rollout(r.rollout_id).reward for r in scored] == [0.25, 0.25]
    assert store.rollout("train-0").components == {}


@pytest.mark.parametrize(
    ("returned", "status"),
    [
        (math.nan, "agent_failure"),
        ("good", "agent_failure"),
        (None, "agent_failure"),
        (1e7, "agent_failure"),  # above rollout.max_abs_reward
        (ZeroDivisionError("x"), "agent_failure"),
        (StopIteration(), "agent_failure"),
        (SystemExit(3), "agent_failure"),
        (ConnectionRefusedError("down"), "infrastructure_failure"),
    ],
)
def test_a_bad_component_fails_its_rollout_alone(store: Store, returned: Any, status: str) -> None:
    def sometimes(task: Task, attempt: Attempt) -> Any:
        if attempt.response == "1":
            return 0.5
        if isinstance(returned, BaseException):
            raise returned
        return returned

    scorer = _scorer(store, {"odd": RewardConfig(function=sometimes)})
    good, bad = _score(scorer, _finished(store, "12"))
    assert (good.status, good.reward) == ("scored", 0.5)
    assert (bad.status, bad.reason) == (status, "bad_component")
    assert bad.reward is None  # a fault of the component is no reward
    assert store.rollout(bad.rollout_id) == bad


@pytest.mark.parametrize("returned", [ValueError("no"), None, float("nan"), "ok", 1e7])
def test_a_held_out_component_that_fails_costs_nothing_but_itself(
    store: Store, returned: Any
) -> None:
    def broken(task: Task, attempt: Attempt) -> Any:
        if isinstance(returned, ValueError):
            raise returned
        return returned

    rewards = {"agent": RewardConfig(), "audit": RewardConfig(weight=0.0, function=broken)}
    scorer = _scorer(store, rewards)
    (rollout,) = _score(scorer, _finished(store, "1"))
    assert (rollout.reward, rollout.components) == (0.25, {"agent": 0.25})
    assert scorer.take_metrics() == {"reward/audit_failed": 1.0}
    assert scorer.take_metrics() == {}


def test_a_function_of_the_group_returns_one_number_each(store: Store) -> None:
    def short(task: Task, attempts: list[Attempt]) -> list[float]:
        return [1.0]

    scored = _score(_scorer(store, {"x": RewardConfig(group=short)}), _finished(store, "12"))
    assert {rollout.reason for rollout in scored} == {"bad_component"}


def test_failed_attempts_are_shown_to_no_component(store: Store) -> None:
    def number(task: Task, attempts: list[Attempt]) -> list[float]:
        return [float(len(attempts))] * len(attempts)

    first, second = _finished(store, "12")
    failed = replace(first, status="agent_failure", reward=0.0, reason="deadline")
    scored = _score(_scorer(store, {"n": RewardConfig(group=number)}), [failed, second])
    assert scored[0] == failed and scored[1].reward == 1.0


def test_a_judge_compares_the_group_once_and_its_verdict_is_cached(store: Store) -> None:
    with serving(_by_digit) as server:
        scorer = _scorer(store, {"best": _judge(server)}, server)
        scored = _score(scorer, _finished(store, "9155"))
        assert [rollout.reward for rollout in scored] == [0.9, 0.1, 0.5, 0.5]
        assert store.reasons("train-0") == {"best": "it is 9"}
        assert len(server.bodies) == 1 and server.keys == ["Bearer sk-1"]
        metrics = scorer.take_metrics()
        assert metrics.pop("reward/best_s") > 0
        assert metrics == {
            "reward/best_calls": 1.0,
            "reward/best_failed_calls": 0.0,
            "reward/best_cached_calls": 0.0,
            "reward/best_tokens": 48.0,
        }
        (body,) = server.bodies
        sent = body["response_format"]["json_schema"]
        assert sent["strict"] and len(sent["schema"]["required"]) == 3  # equal ones share an entry
        store.forget_scores(0)
        again = [store.rollout(rollout.rollout_id) for rollout in scored]
        assert _score(scorer, again) == scored and len(server.bodies) == 1
        assert scorer.take_metrics()["reward/best_cached_calls"] == 1.0


def test_repeated_verdicts_are_averaged_and_their_disagreement_is_measured(store: Store) -> None:
    def by_position(text: str) -> str:
        """Prefer the attempt that comes first."""
        keys = json.loads(text)["attempts"]
        return json.dumps({key: {"score": 10 - 10 * n} for n, key in enumerate(keys)})

    with serving(by_position) as server:
        scorer = _scorer(store, {"best": _judge(server, repeats=16)}, server)
        scored = _score(scorer, _finished(store, "12"))
        rewards = [rollout.components["best"] for rollout in scored]
        assert sum(rewards) == pytest.approx(1.0) and 0 < rewards[0] < 1
        assert len(server.bodies) == 16
        assert 0.3 < scorer.take_metrics()["reward/best_disagreement"] <= 0.5


def test_a_rubric_scores_each_attempt_by_itself(store: Store, tmp_path: Path) -> None:
    def big(text: str) -> str:
        digit = json.loads(text)["attempt"][-1]
        return json.dumps({"big": {"reason": "<b>digit</b>", "score": int(digit)}})

    path = tmp_path / "rubric.yaml"
    path.write_text(RUBRIC)
    with serving(big) as server:
        scorer = _scorer(store, {"big": _judge(server, rubric=str(path))}, server)
        scored = _score(scorer, _finished(store, "09"))
        assert [rollout.reward for rollout in scored] == [0.0, 1.0]
        (alone,) = _score(scorer, _finished(store, "3", phase="eval"))
        assert alone.reward == pytest.approx(1 / 3)
        assert store.reasons("train-1") == {"big": "big 9: <b>digit</b>"}


def _noisy(scores: Sequence[int]) -> Callable[[str], str]:
    """Return a judge by a rubric that gives these scores in turn, whatever it reads."""
    left = list(scores)

    def reply(text: str) -> str:
        score = left.pop(0)
        return json.dumps({"big": {"reason": f"it is {score}", "score": score}})

    return reply


def _by_rubric(server: RemoteServer, folder: Path, **settings: Any) -> dict[str, RewardConfig]:
    path = folder / "rubric.yaml"
    path.write_text(RUBRIC)
    return {"big": _judge(server, rubric=str(path), **settings)}


def test_each_attempt_with_a_text_asks_anew_until_the_mean_is_known(
    store: Store, tmp_path: Path
) -> None:
    with serving(_noisy([9, 1, 5, 4, 6, 5, 5, 5])) as server:
        scorer = _scorer(store, _by_rubric(server, tmp_path, temperature=1.0), server)
        groups = [_score(scorer, _finished(store, "5", f"train{n}")) for n in range(12)]
        assert len(server.bodies) == 8
    rewards = [9 * rollout.components["big"] for (rollout,) in groups]
    assert rewards == pytest.approx([9, 5, 5, 4.75, 5, 5, 5, 5, 5, 5, 5, 5])
    assert len({body["seed"] for body in server.bodies}) == 8
    metrics = scorer.take_metrics()
    assert metrics["reward/big_calls"] == 8 and metrics["reward/big_cached_calls"] == 4
    # Each shows what was written for itself, if anything was.
    assert store.reasons("train1-0") == {"big": "big 1: it is 1"}
    assert store.reasons("train11-0") == {"big": "big 9: it is 9"}


def test_equal_attempts_of_a_group_have_the_mean_of_their_verdicts(
    store: Store, tmp_path: Path
) -> None:
    with serving(_noisy([0, 3, 6, 3, 0, 9])) as server:
        scorer = _scorer(store, _by_rubric(server, tmp_path, temperature=1.0), server)
        scored = _score(scorer, _finished(store, "7777"))
        assert [9 * r.components["big"] for r in scored] == pytest.approx([3, 3, 3, 3])
        assert sorted(store.reasons(r.rollout_id)["big"] for r in scored) == [
            "big 0: it is 0",
            "big 3: it is 3",
            "big 3: it is 3",
            "big 6: it is 6",
        ]
        # Attempts that are scored again have their verdicts already.
        store.forget_scores(0)
        again = [store.rollout(rollout.rollout_id) for rollout in scored]
        assert _score(scorer, again) == scored and len(server.bodies) == 4
        assert scorer.take_metrics()["reward/big_cached_calls"] == 4
        # A later group knows all six.
        later = _score(scorer, _finished(store, "77", "later"))
        assert [9 * r.components["big"] for r in later] == pytest.approx([3.5, 3.5])


@pytest.mark.parametrize(
    ("settings", "num_calls"),
    [
        ({}, 1),  # all verdicts would be equal
        ({"temperature": 1.0, "max_verdicts": 1}, 1),
        ({"temperature": 1.0, "max_verdicts": 3}, 3),
        ({"temperature": 1.0, "max_verdicts": 1, "repeats": 2}, 2),
    ],
    ids=str,
)
def test_calls_on_one_text_are_bounded(
    store: Store, tmp_path: Path, settings: dict[str, Any], num_calls: int
) -> None:
    with serving(_noisy([1, 2, 3, 4, 5])) as server:
        scorer = _scorer(store, _by_rubric(server, tmp_path, **settings), server)
        _score(scorer, _finished(store, "5555"))
        assert len(server.bodies) == num_calls


def test_groups_with_equal_texts_are_compared_in_another_order(store: Store) -> None:
    def by_position(text: str) -> str:
        keys = json.loads(text)["attempts"]
        return json.dumps({key: {"score": 10 - 10 * n} for n, key in enumerate(keys)})

    with serving(by_position) as server:
        scorer = _scorer(store, {"best": _judge(server)}, server)
        groups = [_score(scorer, _finished(store, "12", f"train{n}")) for n in range(12)]
        assert len(server.bodies) == 8
    first, last = ([r.components["best"] for r in group] for group in (groups[0], groups[-1]))
    assert sorted(first) == [0.0, 1.0] and 0.2 < last[0] < 0.8
    assert all(sum(r.components["best"] for r in g) == pytest.approx(1.0) for g in groups)


def test_a_verdict_of_an_older_store_counts(store: Store, tmp_path: Path) -> None:
    with serving(_noisy([0, 0])) as server:
        scorer = _scorer(store, _by_rubric(server, tmp_path, temperature=1.0), server)
        _score(scorer, _finished(store, "5"))
        with contextlib.closing(sqlite3.connect(store.path)) as db, db:
            db.execute(
                "UPDATE judge_verdicts SET asker = '', verdict = ?", (json.dumps({"big": 9}),)
            )
        (later,) = _score(scorer, _finished(store, "5", "later"))
        assert later.components["big"] == pytest.approx(0.5)


def _flaky(replies: Sequence[str | int]) -> Callable[[str], str | int]:
    left = list(replies)
    return lambda text: left.pop(0) if left else _by_digit(text)


@pytest.mark.parametrize(
    ("replies", "num_calls"),
    [
        (["The first is best.", 500], 3),
        ([429], 2),
        (['{"attempt_1": {"score": 99}}'], 2),
    ],
)
def test_a_judge_that_fails_is_asked_again(
    store: Store, replies: list[str | int], num_calls: int
) -> None:
    with serving(_flaky(replies)) as server:
        scorer = _scorer(store, {"best": _judge(server)}, server)
        scored = _score(scorer, _finished(store, "91"))
    assert [rollout.reward for rollout in scored] == [0.9, 0.1]
    assert len(server.bodies) == num_calls
    assert scorer.take_metrics()["reward/best_failed_calls"] == num_calls - 1


@pytest.mark.parametrize(("reply", "num_calls"), [("prose", 3), (503, 3), (401, 1)])
def test_a_judge_that_keeps_failing_drops_the_group(
    store: Store, reply: str | int, num_calls: int
) -> None:
    with serving(lambda _: reply) as server:
        scorer = _scorer(store, {"agent": RewardConfig(), "best": _judge(server)}, server)
        scored = _score(scorer, _finished(store, "91"))
    assert {(r.status, r.reason, r.reward) for r in scored} == {
        ("infrastructure_failure", "judge_failed", None)
    }
    assert len(server.bodies) == num_calls
    assert scorer.take_metrics()["reward/best_failed"] == 2.0
    with contextlib.closing(sqlite3.connect(store.path)) as db:
        assert db.execute("SELECT COUNT(*) FROM judge_verdicts").fetchone() == (0,)


@pytest.mark.parametrize(
    ("url", "hint"),
    [("http://h:80", "/v1?"), ("http://h/api/", "/api/v1?"), ("http://h/v1/", ""), ("h/v1", "")],
)
def test_a_url_without_v1_is_asked_about(url: str, hint: str) -> None:
    assert hint in (found := missing_v1(url)) and bool(found) == bool(hint)


def test_a_judge_without_its_path_names_what_its_url_lacks(store: Store) -> None:
    with serving(lambda _: 404) as server:
        server.url = server.url.removesuffix("/v1")
        scorer = _scorer(store, {"best": _judge(server)}, server)
        scored = _score(scorer, _finished(store, "91"))
    assert "/v1" in (scored[0].detail or "") and len(server.bodies) == 1


def test_a_judge_that_is_down_or_slow_drops_the_group(store: Store) -> None:
    limits = replace(LIMITS, max_attempts=1, call_timeout_s=0.2)

    def slow(text: str) -> str:
        time.sleep(0.6)
        return _by_digit(text)

    with serving(slow) as server:
        rewards = {"best": _judge(server)}
        scored = _score(_scorer(store, rewards, server, limits), _finished(store, "91"))
        assert {rollout.reason for rollout in scored} == {"judge_failed"}
    scored = _score(_scorer(store, rewards, server, limits), _finished(store, "91", phase="down"))
    assert {rollout.reason for rollout in scored} == {"judge_failed"}
