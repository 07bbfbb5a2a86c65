import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_jax.rl.batches.batching import make_batches
from lightning_jax.rl.config import AlgorithmConfig, BatchConfig
from lightning_jax.rl.credit import identical, learned, per_step
from lightning_jax.rl.gae import gae, learnable_states, rollout_gae, state_sequences
from lightning_jax.rl.sequence import StateValues
from lightning_jax.testing.records import trajectory, transition

SHAPE = BatchConfig(rows=2, row_len=16, max_targets=4, head_chunk=4)
rewards = st.floats(-10, 10)


def test_gae_by_hand():
    # discount 0.5, lambda 0.5: G2 = 2, A2 = 2 - 1 = 1; G1 = 0 + 0.5 * (0.5 * 1 + 0.5 * 2) = 0.75,
    # A1 = 0.75 - 3 = -2.25; G0 = 1 + 0.5 * (0.5 * 3 + 0.5 * 0.75) = 1.9375, A0 = -0.0625.
    # By the paper's sums: delta = 1 + 0.5 * 3 - 2 = 0.5, 0 + 0.5 * 1 - 3 = -2.5, 2 - 1 = 1, so
    # A1 = -2.5 + 0.25 * 1 and A0 = 0.5 - 0.25 * 2.5 + 0.0625 * 1.
    advantages, returns = gae([1.0, 0.0, 2.0], [2.0, 3.0, 1.0], discount=0.5, lam=0.5)
    assert advantages == [-0.0625, -2.25, 1.0]
    assert returns == [1.9375, 0.75, 2.0]
    assert gae([], [], discount=1.0, lam=1.0) == ([], [])


def test_lambda_0_is_one_step_and_lambda_1_the_whole_return():
    one_step, _ = gae([1.0, 2.0], [5.0, 7.0], discount=0.5, lam=0.0)
    assert one_step == [1.0 + 0.5 * 7.0 - 5.0, 2.0 - 7.0]
    whole, returns = gae([1.0, 2.0], [5.0, 7.0], discount=0.5, lam=1.0)
    assert (whole, returns) == ([2.0 - 5.0, 2.0 - 7.0], [2.0, 2.0])


def test_a_state_without_a_value_makes_one_step_with_the_one_before():
    # The first two states form one step: 1 + 0.5 * (2 + 0.5 * 4) = 3, minus the value 1.
    advantages, returns = gae([1.0, 2.0, 9.0], [1.0, None, 4.0], discount=0.5, lam=0.0)
    assert returns == [3.0, 4.0, 9.0]
    assert advantages == [2.0, 4.0, 5.0]


@given(st.lists(rewards, min_size=1, max_size=6), rewards, st.floats(0.1, 1.0))
def test_lambda_1_and_values_0_are_per_step_credit_exactly(of_calls, of_rollout, discount):
    calls = [transition([1], [2], reward=reward) for reward in of_calls]
    rollout = trajectory(*calls, reward=of_rollout)
    credit = learned(discount)(rollout, [(0.0,)] * len(calls))
    assert credit == per_step(discount)(rollout)
    assert credit == learned(discount)(rollout, None)


@given(st.integers(1, 12), rewards)
def test_lambda_1_and_values_0_are_identical_credit_exactly(num_calls, reward):
    """Check rewards of whole rollouts, as in the paper on identical credit."""
    rollout = trajectory(*[transition([1], [2])] * num_calls, reward=reward)
    assert learned()(rollout, [(0.0,)] * num_calls) == identical()(rollout)


def test_tokens_and_calls_of_one_rollout():
    """Check two tokens, one of them forced, then a call of forced tokens, then two more tokens."""
    rollout = trajectory(
        transition([1], [5, 6], forced=(True, False), reward=1.0),
        transition([1, 5, 6], [7], forced=(True,), reward=2.0),
        transition([1, 5, 6, 7], [8, 9]),
        reward=4.0,
    )
    values = [(0.5,), None, (3.0, 3.5)]
    tokens = rollout_gae(rollout, values, per_token=True, discount=1.0, lam=1.0)
    assert tokens == [((6.5,), (7.0,)), ((6.0,), (6.0,)), ((1.0, 0.5), (4.0, 4.0))]
    calls = rollout_gae(rollout, [(0.5,), (2.0,), (3.0,)], per_token=False, discount=1.0, lam=0.0)
    assert calls == [((2.5,), (3.0,)), ((3.0,), (5.0,)), ((1.0,), (4.0,))]
    assert rollout_gae(trajectory(), None, per_token=True, discount=1.0, lam=1.0) == []


def test_states_lie_where_prompts_end_or_where_tokens_are_chosen():
    rollout = trajectory(
        transition([1, 2], [5, 6, 7], forced=(False, True, False)),
        transition([1, 2, 5, 6, 7, 3], [8]),
    )
    calls, _ = make_batches(state_sequences([rollout], per_token=False), SHAPE)
    # 1 2 5 6 7 3 is one path, in which prompts end at nodes 1 and 5.
    assert calls[0].tokens[0, :6].tolist() == [1, 2, 5, 6, 7, 3]
    assert calls[0].target_nodes[0, :2].tolist() == [1, 5]
    (tokens,), _ = make_batches(state_sequences([rollout], per_token=True), SHAPE)
    assert tokens.target_nodes[0, :3].tolist() == [1, 3, 5]


def test_what_a_critic_learns():
    rollouts = [
        trajectory(transition([1], [2]), transition([1, 2], [3]), reward=1.0),
        trajectory(transition([1], [4]), transition([4] * 99, [5]), reward=0.0),
    ]
    values = [((0.5,), (0.75,)), ((0.25,), None)]
    config = AlgorithmConfig(credit="learned", gae_lambda=0.0)
    states, metrics = learnable_states(rollouts, values, config)
    assert states == [
        (StateValues((0,), (0.5,), (0.75,)), StateValues((0,), (0.75,), (1.0,))),
        (StateValues((0,), (0.25,), (0.0,)), None),
    ]
    # Returns 1, 1, 0 have variance 2/9. Residuals 0.5, 0.25, -0.25 have mean 1/6, variance 7/72.
    assert metrics == {
        "train/value_mean": 0.5,
        "train/value_explained_variance": pytest.approx(1 - 7 / 72 / (2 / 9)),
        "train/calls_without_value": 1.0,
    }
    assert learnable_states([], [], config) == ([], {"train/calls_without_value": 0.0})


def test_states_of_tokens_leave_out_what_was_forced():
    rollout = trajectory(transition([1], [5, 6, 7], forced=(False, True, False)), reward=2.0)
    config = AlgorithmConfig(credit="learned_token")
    (((states,),), metrics) = learnable_states([rollout], [((1.0, 1.5),)], config)
    assert states == StateValues((0, 2), (1.0, 1.5), (2.0, 2.0))
    assert "train/value_explained_variance" not in metrics  # all returns are equal


def test_equal_returns_whose_variance_is_rounding_explain_nothing():
    tenths = [trajectory(transition([1], [5]), reward=0.1) for _ in range(3)]
    _, metrics = learnable_states(tenths, [((0.5,),)] * 3, AlgorithmConfig(credit="learned"))
    assert "train/value_explained_variance" not in metrics
