import numpy as np
import pytest

from lightning_jax.config import AlgorithmConfig
from lightning_jax.rl.advantages import group_baseline, step_advantages
from lightning_jax.testing.records import trajectory, transition


def rollout(reward: float, *, calls: int = 1, group: str = "g"):
    return trajectory(*[transition([1], [2])] * calls, reward=reward, group=group)


def test_advantages_of_a_group_by_hand():
    # rewards 1, 0, 0, 1: mean 0.5, standard deviation 0.5
    step = [rollout(1.0, calls=2), rollout(0.0), rollout(0.0, calls=3), rollout(1.0)]
    advantages, metrics = step_advantages(step, AlgorithmConfig())
    assert advantages == [(1.0, 1.0), (-1.0,), (-1.0, -1.0, -1.0), (1.0,)]
    assert metrics["train/num_groups"] == 1.0
    assert metrics["train/equal_groups_share"] == 0.0
    assert metrics["train/advantage_abs_mean"] == 1.0


def test_without_std_the_advantage_is_reward_minus_mean():
    advantages, _ = step_advantages(
        [rollout(1.0), rollout(0.25)], AlgorithmConfig(normalize_by_std=False)
    )
    assert advantages == [(0.375,), (-0.375,)]


def test_the_baseline_counts_rollouts_and_not_calls():
    # Over calls the mean would be 3 / 4; over rollouts it is 1 / 2.
    advantages, _ = step_advantages(
        [rollout(1.0, calls=3), rollout(0.0)], AlgorithmConfig(normalize_by_std=False)
    )
    assert advantages == [(0.5, 0.5, 0.5), (-0.5,)]


def test_a_rollout_without_calls_counts_in_the_baseline():
    advantages, _ = step_advantages(
        [rollout(1.0), rollout(0.0, calls=0)], AlgorithmConfig(normalize_by_std=False)
    )
    assert advantages == [(0.5,), ()]


def test_groups_are_apart_and_order_does_not_matter():
    step = [rollout(1.0, group="a"), rollout(3.0, group="b"), rollout(0.0, group="a")]
    step += [rollout(5.0, group="b")]
    advantages, _ = step_advantages(step, AlgorithmConfig())
    assert advantages == [(1.0,), (-1.0,), (-1.0,), (1.0,)]
    turned, _ = step_advantages(step[::-1], AlgorithmConfig())
    assert turned == advantages[::-1]


def test_equal_rewards_and_single_rollouts_give_zeros():
    step = [rollout(0.3, group="equal", calls=2)] * 3 + [rollout(7.0, group="single")]
    advantages, metrics = step_advantages(step, AlgorithmConfig())
    assert advantages == [(0.0, 0.0)] * 3 + [(0.0,)]
    assert metrics["train/equal_groups_share"] == 1.0


def test_equal_up_to_rounding_is_equal():
    baseline, scale = group_baseline(np.asarray([0.1 + 0.2, 0.3]), normalize_by_std=True)
    assert (baseline, scale) == (pytest.approx(0.3), 0.0)


def test_per_step_subtracts_the_mean_return_of_rollouts_from_every_call():
    # Returns seen from the first call, discount 0.5: 0.5 * 1 = 0.5 and 0; their mean 0.25.
    step = [rollout(1.0, calls=2), rollout(0.0)]
    config = AlgorithmConfig(credit="per_step", discount=0.5, normalize_by_std=False)
    assert step_advantages(step, config)[0] == [(0.25, 0.75), (-0.25,)]


def test_no_rollouts_at_all():
    assert step_advantages([], AlgorithmConfig())[0] == []
