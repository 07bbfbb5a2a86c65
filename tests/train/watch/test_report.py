"""Tests of the tables that a run prints at its end."""

import re
from pathlib import Path
from typing import Any

import pytest

from lightning_jax.traces import attributes
from lightning_jax.traces.store import Store
from lightning_jax.train.watch.report import (
    SERVED,
    checkpoint_line,
    failure_table,
    learning_table,
    result_table,
    serve_metrics,
)
from lightning_jax.types import Rollout, RolloutStatus, Span


def test_the_table_has_a_line_for_each_evaluation_and_each_part() -> None:
    rows = [
        {"step": 0, "eval/reward_mean": 0.25, "eval/reward_stderr": 0.125, "eval/num_tasks": 12.0},
        {"step": 1, "rollout/reward_mean": 0.5},
        {
            "step": 2,
            "eval/reward_mean": 0.5,
            "eval/reward_stderr": 0.1,
            "eval/num_tasks": 12.0,
            "eval/change_mean": 0.25,
            "eval/change_stderr": 0.0625,
            "eval/num_better": 4.0,
            "eval/num_worse": 1.0,
            "eval/change_p": 0.375,
            "eval/sampled_reward_mean": 0.3,
            "eval/sampled_reward_stderr": 0.05,
            "eval/sampled_solved_share": 0.75,
            "eval/sampled_unequal_share": 0.5,
            "eval/sampled_attempts": 8.0,
            "eval/sampled_change_mean": 0.125,
            "eval/sampled_change_stderr": 0.025,
            "eval/sampled_num_better": 5.0,
            "eval/sampled_num_worse": 2.0,
            "eval/sampled_change_p": 0.45,
            "eval/change_since_step": 0.0,
            "eval/reward_mean/hops=2": 0.75,
            "eval/reward_stderr/hops=2": 0.2,
            "eval/num_tasks/hops=2": 4.0,
        },
    ]
    assert [
        re.findall(r"[-+]?\d+\.?\d*|hops", line) for line in result_table(rows, "hops").splitlines()
    ] == [
        [],
        ["0", "0.250", "0.125", "12"],
        ["2", "0.500", "0.100", "12", "+0.250", "0.062", "0", "4", "1", "0.38"],
        ["0.300", "0.050", "+0.125", "0.025", "0", "5", "2", "0.45"],
        ["8", "75.0", "50.0"],
        ["hops", "2", "0.750", "0.200", "4"],
    ]
    assert len(result_table(rows).splitlines()) == 5


def test_the_last_baselines_follow_the_evaluations() -> None:
    row = {"eval/reward_mean": 0.25, "eval/reward_stderr": 0.125, "eval/num_tasks": 12.0}
    row |= {f"{name}/source=svamp": value for name, value in row.items()}
    first = {"step": 0, **row, "eval/baseline_constant": 0.5}
    last = {
        "step": 2,
        **row,
        "eval/baseline_constant": 0.125,
        "eval/baseline_sum": 0.0625,
        "eval/baseline_sum/source=svamp": 0.1875,
    }
    lines = result_table([first, last, {"step": 3}], "source").splitlines()
    assert [re.findall(r"constant|sum|svamp|\d\.\d+", line) for line in lines[-2:]] == [
        ["constant", "0.125", "sum", "0.062"],
        ["svamp", "sum", "0.188"],
    ]
    assert len(lines) == 1 + 2 * 2 + 2


def test_failures_are_told_by_reason_with_an_example(tmp_path: Path) -> None:
    store = Store(tmp_path / "store.sqlite")
    ends: list[tuple[RolloutStatus, str | None]] = [
        ("scored", None),
        ("agent_failure", "deadline"),
        ("agent_failure", "deadline"),
    ]
    for number, (status, reason) in enumerate(ends):
        rollout = Rollout(f"r{number}", "t", "g", "train", 0, number, 1, "queued")
        store.add_rollout(rollout)
        store.set_status(rollout.rollout_id, "running")
        detail = reason and f"it took\nlong {number}"
        store.set_status(rollout.rollout_id, status, reward=1.0, reason=reason, detail=detail)
    call: dict[str, Any] = {attributes.POLICY: "policy"}
    spans = [
        Span("t", "1", None, "chat", 0, 1, call),
        Span("t", "2", None, "chat", 1, 2, call | {attributes.ERROR_TYPE: "call_timeout"}, "slow"),
        Span("t", "3", None, "choice", 1, 2, call | {attributes.CHOICE_INDEX: 0}),
        Span("t", "4", None, "tool", 1, 2, {attributes.ERROR_TYPE: "KeyError"}, "no call of ours"),
    ]
    for span in spans:
        store.add_span("r0", span)
    totals, agent, call_ = failure_table(store).splitlines()
    # Scored, failed by the agent, by the infrastructure; calls answered, failed.
    assert re.findall(r"\d+", totals) == ["1", "2", "0", "1", "1"]
    assert re.fullmatch(r"\W*agent\W*2 deadline\b.*\br1: it took long 1", agent)
    assert re.fullmatch(r"\W*call\W*1 call_timeout\b.*\br0", call_)
    store.close()


def test_the_share_of_bandwidth_is_that_of_the_time_between_two_readings() -> None:
    names = ("prefill_tokens", "prefix_hit_tokens", "compiles", *SERVED)
    before = {f"serve/{name}": 0.0 for name in names}
    after = {name: 4.0 for name in before}
    assert "serve/bandwidth_share" not in serve_metrics(before, after)  # on a CPU
    before |= {"serve/decode_s": 1.0, "serve/decode_bound_s": 0.5}
    idle = after | {"serve/decode_s": 1.0, "serve/decode_bound_s": 0.5}
    assert "serve/bandwidth_share" not in serve_metrics(before, idle)
    after |= {"serve/decode_s": 3.0, "serve/decode_bound_s": 1.3}
    assert serve_metrics(before, after)["serve/bandwidth_share"] == pytest.approx(0.4)


def test_the_size_of_checkpoints_is_reported(tmp_path: Path) -> None:
    (tmp_path / "checkpoints/3/state").mkdir(parents=True)
    with (tmp_path / "checkpoints/3/state/data").open("wb") as file:
        file.truncate(1_900_000_000)
    one, two = (checkpoint_line(tmp_path, keep) for keep in (1, 2))
    assert "1.9 GB" in one and "keep=1" in one and one.count("checkpoint.keep") == 1
    assert two.count("checkpoint.keep") == 2


def test_a_run_that_changed_no_weights_says_so() -> None:
    steps = [{"step": s, "rollout/num_rollouts": 8.0, "train/num_updates": 0.0} for s in range(3)]
    steps[0] |= {"train/skipped_updates": 1.0}
    equal = [row | {"train/equal_groups_share": 1.0} for row in steps[:2]]
    lines = learning_table([*equal, steps[2]]).splitlines()
    assert len(lines) == 3 and "nothing was trained" in lines[0]
    assert re.findall(r"\d+", lines[1]) == ["2", "3", "100"]
    trained = steps[2] | {"train/num_updates": 1.0, "train/skipped_updates": 0.0}
    assert learning_table([trained]) == "" == learning_table([{"step": 0, "warmup/loss": 1.0}])
    skipped = trained | {"train/skipped_updates": 1.0}
    assert "nothing was trained" in learning_table([skipped])
