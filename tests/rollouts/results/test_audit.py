"""Tests of the signs of a gamed reward, against values worked by hand."""

from typing import Any

import pytest

from lightning_jax.rollouts.results import audit
from lightning_jax.testing.records import trajectory, transition
from lightning_jax.types import Rollout


def test_repetition_counts_ngrams_that_come_again() -> None:
    # 1212, 2121, 1212, 2121, 1212: two different ones of five
    assert audit.repetition([1, 2] * 4) == pytest.approx(3 / 5)
    assert audit.repetition(range(8)) == 0.0
    assert audit.repetition([1, 1, 1]) == 0.0  # fewer than four tokens
    assert audit.repetition([1, 1, 1], n=2) == 0.5


def test_distinct_ngrams_are_counted_over_all_texts() -> None:
    # 123, 234 and 123, 235: three of four
    assert audit.distinct_ngrams([[1, 2, 3, 4], [1, 2, 3, 5]]) == 0.75
    assert audit.distinct_ngrams([[1, 2], []]) is None


def test_near_copies_share_most_of_their_ngrams() -> None:
    long = list(range(20))  # 18 3-grams, of which a changed end loses one
    assert audit.near_copies([long, [*long[:-1], 99], list(range(50, 70))]) == [True, True, False]
    assert audit.near_copies([long, [*long[:10], *range(70, 80)]]) == [False, False]
    assert audit.near_copies([[1], [1], [2]]) == [True, True, False]
    assert audit.near_copies([[], [1]]) == [False, False]


def test_correlation_is_the_mean_over_groups_that_differ() -> None:
    up = [{"a": float(i), "b": float(i)} for i in range(3)]
    down = [{"a": float(i), "b": -float(i), "c": 1.0} for i in range(3)]
    equal = [{"a": 1.0, "b": float(i)} for i in range(3)]
    assert audit.correlations([up, up, down, equal]) == {("a", "b"): pytest.approx(1 / 3)}
    assert audit.correlations([[], [{"a": 1.0}]]) == {}


def _rollout(number: int, group: str, **components: float) -> Rollout:
    return Rollout(
        rollout_id=f"r{number}",
        task_id="t",
        group_id=group,
        phase="train",
        step=0,
        index=number,
        attempt=1,
        status="scored",
        reward=components.get("proxy", 0.0),
        components=components,
    )


def test_metrics_are_of_runs_whose_reward_has_components() -> None:
    texts: list[tuple[int, ...]] = [(1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4), (9, 8, 7)]
    rollouts = [
        _rollout(i, f"g{i // 2}", agent=0.0, proxy=float(i), held=-float(i)) for i in range(4)
    ]
    trajectories = [
        trajectory(transition([0], list(text)), group=rollout.group_id)
        for rollout, text in zip(rollouts, texts, strict=True)
    ]
    found: dict[str, Any] = audit.audit_metrics(rollouts, trajectories)
    assert found == {
        "audit/near_copies": 0.5,  # the third is of another group
        "audit/repetition_4": 0.0,
        "audit/distinct_3": pytest.approx(3 / 7),
        "audit/correlation/held~proxy": pytest.approx(-1.0),
    }
    plain = [_rollout(i, "g", agent=1.0) for i in range(2)]
    assert audit.audit_metrics(plain, trajectories[:2]) == {}


def test_most_overrated_rank_high_by_the_reward_only() -> None:
    values = [(0.1, 5.0), (0.9, 1.0), (0.5, 0.5), (0.2, 4.0)]
    rollouts = [_rollout(i, "g", proxy=p, held=h) for i, (p, h) in enumerate(values)]
    assert [r.rollout_id for r in audit.most_overrated(rollouts, "held")] == ["r1", "r2"]
    assert audit.most_overrated(rollouts, "other") == []
