from dataclasses import replace

import pytest

from lightning_jax.rl.config import AlgorithmConfig
from lightning_jax.rl.prepare import prepare_step
from lightning_jax.testing.records import trajectory, transition


def step():
    """Build a group of two rollouts.

    The first has a stale and a fresh call and earned 3. The second has a fresh call and earned 1.
    """
    return [
        trajectory(
            transition([1], [2, 3], version=0), transition([1, 2, 3], [4], version=6), reward=3.0
        ),
        trajectory(transition([1], [5, 6], version=6), reward=1.0, rollout="s"),
    ]


def test_a_stale_call_counts_in_the_return_and_is_not_trained_on():
    sequences, metrics = prepare_step(step(), AlgorithmConfig(), policy_version=6)
    assert [s.response_token_ids for s in sequences] == [(4,), (5, 6)]
    assert [s.advantage for s in sequences] == [1.0, -1.0]
    assert [s.weight for s in sequences] == [0.5, 0.25]
    assert [s.states for s in sequences] == [None, None]
    assert metrics["train/dropped_stale"] == 1.0
    assert "train/overlong_penalty_mean" not in metrics


def test_a_stale_call_has_a_value_and_teaches_the_critic_nothing():
    algorithm = AlgorithmConfig(
        credit="learned", gae_lambda=0.0, baseline="none", normalize="none", max_staleness=2
    )
    values = [((1.0,), (2.5,)), ((0.5,),)]
    sequences, metrics = prepare_step(step(), algorithm, policy_version=6, values=values)
    assert [s.advantage for s in sequences] == [0.5, 0.5]
    states = [s.states for s in sequences if s.states is not None]
    assert [state.returns for state in states] == [(3.0,), (1.0,)]
    assert [state.weight for state in states] == [0.5, 0.5]
    assert metrics["train/value_mean"] == pytest.approx(4 / 3)


def test_long_responses_cost_before_credit_is_given():
    algorithm = AlgorithmConfig(
        overlong_penalty=2.0, overlong_max_tokens=2, overlong_buffer=0, baseline="none",
        normalize="none",
    )  # fmt: skip
    sequences, metrics = prepare_step(step(), algorithm, policy_version=0)
    # 3 - 2 for both calls of the first rollout, 1 - 2 for the second rollout
    assert [s.advantage for s in sequences] == [1.0, 1.0, -1.0]
    assert metrics["train/overlong_penalty_mean"] == pytest.approx(4 / 3)


def test_calls_that_a_limit_cut_count_in_their_group_and_are_not_trained():
    first, second = step()
    cut = replace(second.transitions[0], finish_reason="length")
    rollouts = [first, replace(second, transitions=(cut,))]
    sequences, metrics = prepare_step(
        rollouts, AlgorithmConfig(overlong_filter=True), policy_version=0
    )
    plain, _ = prepare_step(rollouts, AlgorithmConfig(), policy_version=0)
    assert metrics["train/dropped_cut_short"] == 1.0
    assert [s.advantage for s in sequences] == [s.advantage for s in plain[:-1]]
    assert sequences[0].advantage != 0.0


def test_with_dpo_the_calls_of_pairs_are_what_is_trained():
    third = trajectory(transition([1], [7], version=6), reward=2.0, rollout="t")
    algorithm = AlgorithmConfig(
        loss="dpo", overlong_penalty=2.0, overlong_max_tokens=2, overlong_buffer=0
    )
    # Returns are 3 - 2, 1 - 2 and 2. The last is the best and the second the worst.
    sequences, metrics = prepare_step([*step(), third], algorithm, policy_version=0)
    assert [(s.response_token_ids, s.advantage) for s in sequences] == [((7,), 1.0), ((5, 6), -1.0)]
    assert [(s.weight, s.pair) for s in sequences] == [(1.0, 0)] * 2
    assert (metrics["train/num_pairs"], metrics["train/num_groups"]) == (1.0, 1.0)
    assert metrics["train/overlong_penalty_mean"] == 1.0
    # The first has a stale call.
    sequences, metrics = prepare_step([*step(), third], algorithm, policy_version=6)
    assert (metrics["train/num_pairs"], metrics["train/dropped_stale"]) == (1.0, 1.0)
    assert prepare_step(step(), algorithm, policy_version=6)[0] == []


@pytest.mark.parametrize("reward, share", [(0.0, 0.0), (2.0, 0.0), (2.5, 1.0)])
def test_failed_rollouts_with_an_advantage_are_counted(reward, share):
    rollouts = [
        trajectory(transition([1], [2]), reward=3.0),
        trajectory(transition([1], [3]), reward=1.0, rollout="s"),
        replace(trajectory(transition([1], [4]), reward=reward, rollout="f"), is_failed=True),
    ]
    _, metrics = prepare_step(rollouts, AlgorithmConfig(), policy_version=0)
    assert metrics["train/failures_gain_share"] == share
