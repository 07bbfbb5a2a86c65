"""Tests of step checks, such as consecutive steps without a finite gradient."""

import logging

import pytest
from coded import raises_coded
from log_events import records

from lightning_jax.models.policies import Policy
from lightning_jax.rl.config import BatchConfig
from lightning_jax.train.watch.findings import findings
from lightning_jax.train.watch.report import summary
from lightning_jax.train.watch.watches import (
    DropWatch,
    FiniteWatch,
    LearningWatch,
    NotFinite,
    PackingWatch,
)


def step(**skipped: float) -> dict[str, float]:
    """Return metrics of one update per policy, and whether it was skipped."""
    found = {}
    for name, value in skipped.items():
        found |= {f"train/num_updates/policy={name}": 1.0}
        found |= {f"train/skipped_updates/policy={name}": value}
    return found


def test_one_policy_that_never_learns_stops_the_run_though_the_other_does() -> None:
    watch = FiniteWatch((Policy("a"), Policy("b", 1)), 2)
    watch.after_update(0, step(a=0.0, b=1.0))
    watch.after_update(1, step(a=1.0, b=0.0))
    watch.after_update(2, step(a=0.0))  # b has no update
    watch.after_update(3, step(a=0.0, b=1.0))
    with raises_coded(NotFinite, "not_finite", "b"):
        watch.after_update(4, step(a=0.0, b=1.0))


def test_rows_that_are_full_of_targets_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "lightning_jax")
    watch = PackingWatch(BatchConfig(row_len=512, max_targets=256))
    # Not full; also full of nodes; a single row; full of targets, twice.
    for step, (rows, nodes, full) in enumerate(
        [
            (9.0, 2e3, 0.2),
            (5.0, 2.3e3, 0.9),
            (1.0, 1e2, 0.9),
            (16.0, 4455.0, 0.88),
            (15.0, 3.5e3, 0.9),
        ]
    ):
        row = {"train/num_rows": rows, "train/tokens_forest": nodes, "train/targets_share": full}
        watch.after_update(step, row)
    (record,) = records(caplog, "rows_full_of_targets")
    assert (record.step, record.rows, record.needed) == (3, 16, 9)
    assert len(caplog.records) == 1


def test_sequences_that_no_row_holds_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "lightning_jax")
    watch = DropWatch(BatchConfig(row_len=512, max_targets=256))
    for step, (long, many) in enumerate([(0.0, 0.0), (2.0, 0.0), (3.0, 1.0)]):
        watch.after_update(
            step, {"train/dropped_too_long": long, "train/dropped_too_many_targets": many}
        )
    found = [(r.step, r.reason, r.count) for r in records(caplog, "sequences_dropped")]
    assert found == [(1, "too_long", 2), (2, "too_many_targets", 1)]
    assert len(caplog.records) == 2


def test_failed_rollouts_are_told_with_the_step() -> None:
    row = {"eval/reward_mean": 0.25, "eval/num_agent_failures": 0.0, "rollout/entropy": 1.23456}
    assert summary(row) == "eval 0.25 entropy 1.23"
    row |= {"eval/num_agent_failures": 2.0, "rollout/num_infrastructure_failures": 1.0}
    assert summary(row) == "eval 0.25 entropy 1.23 failed 3"


LEARNS = {
    "rollout/num_rollouts": 8.0,
    "rollout/num_scored": 8.0,
    "train/equal_groups_share": 0.4,
    "rollout/cut_short_share": 0.1,
    "train/adjusted_share": 0.04,
}


def test_a_step_that_learns_has_no_findings() -> None:
    assert findings(LEARNS) == [] == findings({"warmup/loss": 1.0})
    of_a_batch = {"train/equal_groups_share": 1.0, "train/advantage_abs_mean": 0.5}
    assert findings(LEARNS | of_a_batch) == []
    assert findings({"train/equal_groups_share": 1.0, "train/teacher_share": 1.0}) == []


@pytest.mark.parametrize(
    ("changed", "kind", "share"),
    [
        ({"rollout/dropped_no_calls": 2.0}, "no_calls", 0.25),
        ({"train/equal_groups_share": 1.0}, "equal_groups", 1.0),
        ({"train/equal_groups_share": 0.6}, "equal_groups", 0.6),
        ({"train/failures_gain_share": 0.25}, "failures_gain", 0.25),
        ({"rollout/cut_short_share": 0.75}, "cut_short", 0.75),
        ({"serve/requests": 40.0, "serve/late_responses": 10.0}, "late", 0.25),
        ({"rollout/infrastructure_failure_deadline_in_queue": 2.0}, "deadline_in_queue", 0.25),
        ({"rollout/agent_failure_deadline_in_queue": 2.0}, "deadline_in_queue", 0.25),  # older
        ({"train/adjusted_share": 0.37}, "adjusted", 0.37),
        ({"rollout/num_calls": 8.0, "train/without_teacher": 4.0}, "without_teacher", 0.5),
        (
            {
                "rollout/num_calls": 8.0,
                "train/without_teacher": 4.0,
                "train/other_temperature": 4.0,
            },
            "other_temperature",
            0.5,
        ),
        ({"rollout/external_too_old_share": 0.05}, "too_old", 0.05),
        ({"rollout/num_calls": 20.0, "train/dropped_stale": 1.0}, "stale_calls", 0.05),
        (
            {
                "rollout/num_calls": 20.0,
                "train/dropped_stale/policy=a": 1.0,
                "train/dropped_stale/policy=b": 2.0,
            },
            "stale_calls",
            0.15,
        ),
    ],
)
def test_what_keeps_a_step_from_learning_is_warned_of_once(
    changed: dict[str, float], kind: str, share: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "lightning_jax")
    watch = LearningWatch()
    for step, row in enumerate([LEARNS, LEARNS | changed, LEARNS | changed]):
        watch.after_step(step, row)
    (record,) = records(caplog, "little_learned")
    assert (record.step, record.finding.kind, record.finding.share) == (1, kind, share)
