"""Tests of the warning about a reward that rises while a held-out component falls."""

import pytest
from log_events import records

from lightning_jax.rollouts.config import RewardConfig
from lightning_jax.train.watch.watches import WINDOW, GamingWatch, change
from lightning_jax.types import Rollout

REWARDS = {"proxy": RewardConfig(function="f.py:f"), "held": RewardConfig(0.0, function="f.py:g")}
ROLLOUTS = [
    Rollout(
        rollout_id=f"r{i}",
        task_id="t",
        group_id="g",
        phase="train",
        step=0,
        index=i,
        attempt=1,
        status="scored",
        reward=float(i),
        components={"proxy": float(i), "held": -float(i)},
    )
    for i in range(6)
]


def _observe(watch: GamingWatch, pairs: list[tuple[float, float]]) -> None:
    for step, (reward, held) in enumerate(pairs):
        metrics = {"rollout/reward_mean": reward, "reward/held_mean": held}
        watch.after_rollouts(step, ROLLOUTS, metrics)


def test_change_is_in_standard_errors_of_the_two_means() -> None:
    # variances 1/3 and 1/3, so the error is sqrt((1/3 + 1/3) / 4)
    values = [0.0, 1.0, 0.0, 1.0, 7.0, 2.0, 3.0, 2.0, 3.0]
    assert change(values) == pytest.approx(2.0 / (1 / 6) ** 0.5)
    assert change(values[: 2 * WINDOW - 1]) == 0.0


def test_it_warns_once_and_names_rollouts(caplog: pytest.LogCaptureFixture) -> None:
    noise = [0.0, 0.1] * 5
    pairs = [(0.2 * i + e, 1.0 - 0.1 * i + e / 2) for i, e in enumerate(noise)]
    _observe(GamingWatch(REWARDS), pairs)
    (record,) = records(caplog, "gamed_reward")
    assert record.component == "held" and record.step >= 2 * WINDOW - 1
    assert record.named == ["r5", "r4", "r3"]


@pytest.mark.parametrize(("rise", "fall"), [(0.2, 0.0), (0.2, -0.1), (0.0, 0.1), (-0.2, 0.1)])
def test_it_is_silent_unless_both_move_apart(
    caplog: pytest.LogCaptureFixture, rise: float, fall: float
) -> None:
    noise = [0.0, 0.1] * 5
    _observe(GamingWatch(REWARDS), [(rise * i + e, e - fall * i) for i, e in enumerate(noise)])
    assert not records(caplog, "gamed_reward")


def test_weighted_components_are_not_held_out(caplog: pytest.LogCaptureFixture) -> None:
    watch = GamingWatch({"held": RewardConfig(0.5, function="f.py:g")})
    _observe(watch, [(0.2 * i, -0.1 * i) for i in range(10)])
    assert not records(caplog, "gamed_reward")
