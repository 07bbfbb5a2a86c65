"""Tests that nothing is left out of training without a counter."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lightning_jax.rollouts.config import RolloutConfig
from lightning_jax.rollouts.results.metrics import (
    MAX_NAMES,
    agent_metrics,
    eval_change,
    eval_metrics,
    eval_metrics_by,
    rollout_metrics,
    sampled_metrics,
    task_rewards,
    to_trajectories,
)
from lightning_jax.testing.records import trajectory, transition
from lightning_jax.traces import attributes
from lightning_jax.traces.config import RewardRule, RoleConfig
from lightning_jax.traces.store import Store
from lightning_jax.traces.trajectories import TraceReader, cap_failures
from lightning_jax.types import Rollout, Span


def _rollout(index: int, status: str, **fields: object) -> Rollout:
    values = {
        "rollout_id": f"r{index}",
        "task_id": "t",
        "group_id": f"g{index}",
        "phase": "train",
        "step": 0,
        "index": index,
        "attempt": 1,
        "status": status,
    }
    return Rollout(**(values | fields))  # type: ignore[arg-type]


def test_rollouts_without_reward_or_calls_are_counted(tmp_path: Path) -> None:
    store = Store(tmp_path / "store.sqlite")
    rollouts = [
        _rollout(0, "scored", reward=1.0),
        _rollout(1, "agent_failure", reward=0.0, reason="GraphRecursionError"),
        _rollout(2, "agent_failure", reason="deadline"),
        _rollout(3, "infrastructure_failure", reason="call_timeout", attempt=3),
    ]
    trajectories, metrics = to_trajectories(store, rollouts, policy_version=0)
    store.close()
    assert [t.rollout_id for t in trajectories] == ["r0", "r1"]
    assert metrics["rollout/dropped_no_reward"] == 2
    assert metrics["rollout/dropped_no_calls"] == 2
    assert metrics["rollout/agent_failure_graph_recursion_error"] == 1
    assert metrics["rollout/infrastructure_failure_call_timeout"] == 1
    assert metrics["rollout/num_retries"] == 1
    assert metrics["rollout/reward_mean"] == 0.5


def test_entropy_is_the_mean_surprise_of_chosen_tokens() -> None:
    # Log-probs are -0.1, -0.2, ... of each call; a grammar forced the last of the first.
    calls = (transition([1], [2, 3, 4], forced=(False, False, True)), transition([1], [2]))
    metrics = rollout_metrics([_rollout(0, "scored")], [trajectory(*calls)], policy_version=0)
    assert metrics["rollout/entropy"] == pytest.approx((0.1 + 0.2 + 0.1) / 3)


def test_lengths_and_staleness_by_hand() -> None:
    calls = (transition([1], [2, 3], version=4), transition([1], [2, 3, 4, 5], version=5))
    metrics = rollout_metrics([_rollout(0, "scored", reward=1.0)], [trajectory(*calls)], 6)
    assert metrics["rollout/response_tokens_mean"] == 3
    assert metrics["rollout/response_tokens_max"] == 4
    # Two tokens are two steps old, four are one step old.
    assert metrics["train/staleness_mean"] == pytest.approx(8 / 6)
    assert metrics["rollout/cut_short_share"] == 0


def test_full_rewards_are_those_of_1_or_more() -> None:
    rollouts = [_rollout(i, "scored", reward=r) for i, r in enumerate((0.5, 1 - 1e-9, 2.0, 0.0))]
    trajectories = [trajectory(reward=r.reward or 0.0) for r in rollouts]
    assert rollout_metrics(rollouts, trajectories, 0)["rollout/full_reward_share"] == 0.5


def test_only_calls_that_train_are_stale() -> None:
    frozen = transition([1], [2, 3], version=0, trains=False)
    learned = transition([1], [2, 3], version=5)
    for calls, expected in (((frozen, learned), 1.0), ((frozen,), None)):
        metrics = rollout_metrics([_rollout(0, "scored", reward=1.0)], [trajectory(*calls)], 6)
        assert metrics.get("train/staleness_mean") == expected


def test_calls_that_are_too_old_to_train_have_no_age() -> None:
    rollouts = [_rollout(0, "scored", reward=1.0)]
    calls = [transition([1], [2], version=version) for version in (1, 4, 5)]
    metrics = rollout_metrics(rollouts, [trajectory(*calls)], 6, max_staleness=2)
    assert (metrics["train/staleness_mean"], metrics["train/staleness_max"]) == (1.5, 2)
    assert "train/staleness_share/age=5" not in metrics
    assert rollout_metrics(rollouts, [trajectory(*calls)], 6)["train/staleness_max"] == 5


def test_a_failed_agent_counts_as_0_whatever_training_gives_it() -> None:
    rollouts = [
        _rollout(0, "scored", reward=1.0, task_id="a"),
        _rollout(1, "agent_failure", reward=-1.0, reason="deadline", task_id="b"),
    ]
    assert eval_metrics(rollouts)["eval/reward_mean"] == 0.5
    before = [_rollout(2, "scored", reward=0.0, task_id=task) for task in "ab"]
    change = eval_change(before, rollouts)
    assert (change["eval/num_better"], change["eval/num_worse"]) == (1, 0)


def test_an_evaluation_has_its_standard_error() -> None:
    rollouts = [_rollout(i, "scored", reward=float(i == 0)) for i in range(3)]
    rollouts += [_rollout(3, "agent_failure", reward=None, reason="deadline")]
    rollouts += [_rollout(4, "infrastructure_failure", reason="engine_error")]
    metrics = eval_metrics(rollouts)
    assert metrics["eval/num_tasks"] == 4
    assert metrics["eval/reward_mean"] == 0.25
    # Deviations .75, -.25, -.25, -.25: variance .75 / 3, standard error sqrt(.25 / 4).
    assert metrics["eval/reward_stderr"] == pytest.approx(0.25)
    assert metrics["eval/full_reward_share"] == 0.25
    assert metrics["eval/num_infrastructure_failures"] == 1
    assert "eval/reward_mean" not in eval_metrics([])


def test_repeats_of_a_task_count_as_one_measurement() -> None:
    rewards = {"a": (1.0, 0.0, 0.5), "b": (1.0,), "c": (0.0, 0.0)}
    rollouts = [
        _rollout(index, "scored", reward=reward, task_id=task, group_id=f"g-{task}")
        for task, values in rewards.items()
        for index, reward in enumerate(values)
    ]
    rollouts.append(_rollout(1, "agent_failure", task_id="b", group_id="g-b", reason="deadline"))
    metrics = eval_metrics(rollouts)
    # Task means 0.5, 0.5 and 0: mean 1/3, variance 1/12.
    assert (metrics["eval/num_tasks"], metrics["eval/num_agent_failures"]) == (3, 1)
    assert metrics["eval/reward_mean"] == pytest.approx(1 / 3)
    assert metrics["eval/reward_stderr"] == pytest.approx((1 / 12 / 3) ** 0.5)
    newer = replace(rollouts[0], attempt=2, reward=0.25)
    assert task_rewards([*rollouts, newer])["a"] == [0.25, 0.0, 0.5]


def _of_task(index: int, status: str, **fields: object) -> Rollout:
    return _rollout(index, status, task_id=f"t{index}", **fields)


def test_evaluations_are_compared_task_by_task() -> None:
    before = [
        _of_task(0, "infrastructure_failure", reason="engine_error"),
        *(_of_task(i, "scored", reward=reward) for i, reward in enumerate((0.5, 0.0, 1.0, 0.0))),
        _of_task(4, "scored", reward=1.0),
    ]
    after = [
        *(_of_task(i, "scored", reward=reward) for i, reward in enumerate((0.5, 1.0, 0.5, 1.0))),
        _of_task(4, "infrastructure_failure", reason="engine_error"),
        _of_task(5, "scored", reward=1.0),
    ]
    # Tasks 0 to 3 were measured twice: differences 0, 1, -0.5, 1 of mean 0.375, variance 0.5625.
    assert eval_change(before, after) == {
        "eval/change_mean": pytest.approx(0.375),
        "eval/change_stderr": pytest.approx(0.375),
        "eval/num_better": 2.0,
        "eval/num_worse": 1.0,
        "eval/change_p": 1.0,  # 2 to 1
    }
    failed = eval_change(before, [_of_task(2, "agent_failure", reason="deadline")])
    assert (failed["eval/change_mean"], failed["eval/change_stderr"]) == (-1.0, 0.0)
    assert eval_change(before, after[4:]) == eval_change([], after) == {}


def test_sampled_attempts_are_averaged_by_task() -> None:
    rewards = {0: (1.0, 0.0), 1: (0.25, 0.25), 2: (1.0, 1.0 - 1e-9)}
    rollouts = [
        replace(_of_task(task, "scored", reward=reward), index=index)
        for task, values in rewards.items()
        for index, reward in enumerate(values)
    ]
    rollouts.append(replace(_of_task(3, "agent_failure", reason="deadline"), index=0))
    rollouts.append(replace(_of_task(4, "infrastructure_failure", reason="e"), index=0))
    # Means 0.5, 0.25, 1 and 0 of four tasks.
    assert sampled_metrics(rollouts) == {
        "eval/sampled_reward_mean": pytest.approx(0.4375),
        "eval/sampled_reward_stderr": pytest.approx(np.std([0.5, 0.25, 1, 0], ddof=1) / 2),
        "eval/sampled_solved_share": 0.5,
        "eval/sampled_unequal_share": 0.25,
        "eval/sampled_attempts": 2.0,
    }
    assert sampled_metrics(rollouts[-1:]) == {}


def test_what_agents_measured_is_averaged() -> None:
    rollouts = [
        _rollout(0, "scored", reward=1.0, metrics={"f1": 1.0, "goldFound": 0.5}),
        _rollout(1, "scored", reward=0.2, metrics={"f1": 0.25}),
        _rollout(2, "agent_failure", reason="deadline"),  # counts as 0
        _rollout(3, "infrastructure_failure", reason="engine_error"),  # not measured
    ]
    metrics = eval_metrics(rollouts)
    assert metrics["eval/agent_f1_mean"] == pytest.approx(1.25 / 3)
    assert metrics["eval/agent_gold_found_mean"] == pytest.approx(0.5 / 3)
    assert rollout_metrics(rollouts, [], 0)["rollout/agent_f1_mean"] == pytest.approx(1.25 / 3)
    tasks = [{"hops": 2}, {"hops": 3}, {"hops": 2}, {"hops": 2}]
    parts = eval_metrics_by("hops", tasks, rollouts)
    assert parts["eval/agent_f1_mean/hops=2"] == 0.5
    assert parts["eval/agent_f1_mean/hops=3"] == 0.25


def test_a_dropped_value_counts_for_its_reason_and_in_no_mean() -> None:
    dropped = {"dropped_metrics/null/f1": 1.0, "dropped_metrics/not_finite/em": 1.0}
    rollouts = [
        _rollout(0, "scored", reward=1.0, metrics={"f1": 1.0, "em": 1.0}),
        _rollout(1, "scored", reward=1.0, metrics=dropped),
        _rollout(2, "scored", reward=0.0, metrics={"f1": 0.5}),  # `em` is 0
        _rollout(3, "agent_failure", reason="deadline"),
    ]
    assert {k: v for k, v in eval_metrics(rollouts).items() if k.startswith("eval/agent_")} == {
        "eval/agent_f1_mean": pytest.approx(1.5 / 3),
        "eval/agent_em_mean": pytest.approx(1 / 3),
        "eval/agent_dropped_metrics_null_mean": pytest.approx(1 / 4),
        "eval/agent_dropped_metrics_not_finite_mean": pytest.approx(1 / 4),
    }


def test_an_evaluation_by_a_field_of_the_tasks() -> None:
    tasks = [{"id": "a", "hops": 2}, {"id": "b", "hops": 3}, {"id": "c", "hops": 2}, {"id": "d"}]
    rollouts = [
        _rollout(0, "scored", reward=1.0),
        _rollout(1, "infrastructure_failure", reason="engine_error"),
        _rollout(2, "agent_failure", reason="deadline"),
        _rollout(3, "scored", reward=0.5),
    ]
    metrics = eval_metrics_by("hops", tasks, rollouts)
    assert metrics["eval/reward_mean/hops=2"] == 0.5
    assert metrics["eval/reward_stderr/hops=2"] == pytest.approx(0.5)
    assert metrics["eval/num_agent_failures/hops=2"] == 1
    assert metrics["eval/num_infrastructure_failures/hops=3"] == 1
    assert "eval/reward_mean/hops=3" not in metrics
    assert metrics["eval/reward_mean/hops=missing"] == 0.5
    assert eval_metrics_by(None, tasks, rollouts) == {}


def _call(number: int, agent: str, finish: str = "stop") -> Span:
    values = {
        attributes.OPERATION_NAME: "chat",
        attributes.ROLLOUT_ID: "r0",
        attributes.POLICY: "policy",
        attributes.AGENT: agent,
        attributes.PROMPT_TOKEN_IDS: (1,),
        attributes.RESPONSE_TOKEN_IDS: (2, 3),
        attributes.BEHAVIOR_LOGPROBS: (-1.0, -1.0),
        attributes.SAMPLING_LOGPROBS: (-1.0, -1.0),
        attributes.POLICY_VERSIONS: (0, 0),
        attributes.RESPONSE_FINISH_REASONS: (finish,),
    }
    return Span("t", f"s{number}", None, "chat", number, number + 1, values)


def test_frozen_agents_are_left_out_and_rules_reach_the_others(tmp_path: Path) -> None:
    store = Store(tmp_path / "store.sqlite")
    for span in (_call(0, "writer"), _call(1, "checker", "length"), _call(2, "writer")):
        store.add_span("r0", span)
    reader = TraceReader(
        {"checker": RoleConfig(agent="checker", trains=False)},
        {"cut_short": RewardRule("cut_short", -0.5), "broke": RewardRule("tool_error", -1.0)},
    )
    rollouts = [_rollout(0, "scored", reward=1.0)]
    (trained,), metrics = to_trajectories(store, rollouts, policy_version=0, reader=reader)
    store.close()
    assert [(call.agent, call.reward) for call in trained.transitions] == [
        ("writer", -0.5),  # the checker's penalty
        ("writer", 0.0),
    ]
    assert metrics["rollout/dropped_frozen_calls"] == 1
    assert metrics["rollout/rule_cut_short"] == 1 and metrics["rollout/rule_broke"] == 0
    assert metrics["rollout/calls_mean/agent=writer"] == 2
    assert metrics["rollout/calls_mean/agent=checker"] == 1
    assert metrics["rollout/call_reward_mean/agent=checker"] == -0.5
    assert metrics["rollout/cut_short_share/agent=writer"] == 0
    assert metrics["rollout/reward_mean/agent=checker"] == 1.0


def test_calls_without_a_name_have_no_metrics_of_their_own() -> None:
    assert agent_metrics([trajectory(transition([1], [2]))]) == {}


@pytest.mark.parametrize("cost", [-6e5, -1e308])
def test_rewards_of_rules_over_the_limit_fail_the_agent(tmp_path: Path, cost: float) -> None:
    """A rule applies to each event, so an agent can add up any number."""
    store = Store(tmp_path / "store.sqlite")
    for number in range(2):
        store.add_span("r0", _call(number, "", "length"))
    store.add_span("r1", _call(2, ""))
    rollouts = [_rollout(0, "scored", reward=1.0), _rollout(1, "scored", reward=1.0)]
    rules = {"cut_short": RewardRule("cut_short", cost)}
    for failure_reward in (-2.0, None):
        limits = RolloutConfig(agent_failure_reward=failure_reward)
        reader = TraceReader(rules=rules, limits=limits)
        trained, metrics = to_trajectories(store, rollouts, policy_version=0, reader=reader)
        assert metrics["rollout/agent_failure_bad_reward"] == 1
        assert metrics["rollout/num_scored"] == 1
        assert metrics.get("rollout/dropped_bad_reward", 0.0) == float(failure_reward is None)
        rewards = {t.rollout_id: (t.reward, [c.reward for c in t.transitions]) for t in trained}
        failed = {} if failure_reward is None else {"r0": (failure_reward, [0.0, 0.0])}
        assert rewards == failed | {"r1": (1.0, [0.0])}
    store.close()


def test_failing_pays_no_more_than_the_worst_attempt() -> None:
    call = transition([1], [2])
    worst = replace(trajectory(replace(call, reward=-0.5)), reward=-1.0)
    other = replace(trajectory(call), reward=-0.2)
    failed = replace(trajectory(replace(call, reward=-0.1)), reward=0.0, is_failed=True)
    chosen = replace(failed, reward=-9.0)
    capped = cap_failures([worst, other, failed, chosen])
    assert [t.reward for t in capped] == pytest.approx([-1.0, -0.2, -1.4, -9.0])
    assert cap_failures([failed]) == [failed]  # nothing to compare it with
    better = [replace(worst, reward=2.0), failed]
    assert cap_failures(better) == better


def test_names_in_a_row_of_metrics_are_bounded() -> None:
    rollouts = [
        _rollout(n, "scored", reward=1.0, metrics={"f1": 0.5, f"m{n}": 1.0, "x" * 101: 1.0})
        for n in range(MAX_NAMES + 50)
    ]
    failed = [_rollout(n, "agent_failure", reason=f"Error{n}x{n}") for n in range(MAX_NAMES, 2000)]
    calls = [replace(transition([1], [2]), agent=f"a{n}") for n in range(MAX_NAMES + 50)]
    metrics = rollout_metrics([*rollouts, *failed], [], 0)
    measured = [name for name in metrics if name.startswith("rollout/agent_m")]
    assert len(measured) == MAX_NAMES - 2
    mean = metrics["rollout/agent_f1_mean"]
    assert mean == pytest.approx(0.5 * len(rollouts) / (len(rollouts) + len(failed)))
    dropped = (len(rollouts) - len(measured)) + len(rollouts)  # rare names, and the long name
    assert metrics["rollout/agent_dropped_metrics_mean"] == pytest.approx(
        dropped / (len(rollouts) + len(failed))
    )
    assert metrics["rollout/agent_failure_other"] == len(failed) - MAX_NAMES
    by_agent = agent_metrics([trajectory(*calls)])
    assert by_agent["rollout/calls_mean/agent=other"] == 50
    assert sum(name.startswith("rollout/calls_mean") for name in by_agent) == MAX_NAMES + 1
