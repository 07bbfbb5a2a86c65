from dataclasses import replace

import pytest
from coded import raises_coded

from lightning_jax.errors import InvalidValue
from lightning_jax.rl.config import AlgorithmConfig
from lightning_jax.rl.credit import (
    SCHEMES,
    assign_credit,
    drop_overlong,
    identical,
    learned,
    overlong_penalty,
    per_step,
    punish_overlong,
)
from lightning_jax.testing.records import trajectory, transition


def calls(*rewards: float):
    return [transition([1], [2], reward=reward) for reward in rewards]


def test_identical_gives_every_call_the_whole_return():
    # 1.0 from the rollout + 0.25 + 0.5 from the calls
    rollout = trajectory(*calls(0.25, 0.0, 0.5), reward=1.0)
    assert identical()(rollout) == (1.75, 1.75, 1.75)


def test_per_step_discounts_what_comes_later():
    # r = (0.25, 0, 0.5 + 1): G2 = 1.5; G1 = 0 + 0.5 * 1.5 = 0.75; G0 = 0.25 + 0.5 * 0.75 = 0.625
    rollout = trajectory(*calls(0.25, 0.0, 0.5), reward=1.0)
    assert per_step(0.5)(rollout) == (0.625, 0.75, 1.5)


def test_without_discount_and_call_rewards_the_schemes_agree():
    rollout = trajectory(*calls(0.0, 0.0), reward=0.7)
    assert identical()(rollout) == per_step()(rollout) == (0.7, 0.7)


def test_learned_credit_by_hand():
    # lambda 0, discount 0.5: 0.25 + 0.5 * 3 - 2 and 1.5 - 3
    rollout = trajectory(*calls(0.25, 0.5), reward=1.0)
    assert learned(0.5, 0.0)(rollout, [(2.0,), (3.0,)]) == (-0.25, -1.5)
    # With one more token of value 4 in the first call: 0.5 * 4 - 2, 0.25 + 1.5 - 4
    longer = trajectory(transition([1], [2, 3], reward=0.25), calls(0.5)[0], reward=1.0)
    tokens = learned(0.5, 0.0, per_token=True)(longer, [(2.0, 4.0), (3.0,)])
    assert tokens == ((0.0, -2.25), (-1.5,))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_rollout_without_calls_has_no_credit_but_a_return(scheme):
    credit = assign_credit([trajectory(reward=0.5)], AlgorithmConfig(credit=scheme))
    assert credit.calls == [()] and credit.returns.tolist() == [0.5]


def test_a_return_depends_on_no_critic():
    # 0.25 + 0.5 * (0.5 + 1), whatever the values and lambda
    rollout = trajectory(*calls(0.25, 0.5), reward=1.0)
    algorithm = AlgorithmConfig(credit="learned", discount=0.5, gae_lambda=0.0)
    credit = assign_credit([rollout], algorithm, [[(2.0,), (3.0,)]])
    assert credit.calls == [(-0.25, -1.5)] and credit.returns.tolist() == [1.0]


def test_a_reward_that_is_not_finite_is_refused():
    with raises_coded(InvalidValue, "not_finite"):
        assign_credit([trajectory(*calls(float("nan")))], AlgorithmConfig())


def test_overlong_penalty_by_hand():
    # 10 tokens or more cost the whole penalty, 8 to 10 a rising share
    lengths = (0, 8, 9, 10, 11)
    shares = [overlong_penalty(length, max_tokens=10, buffer=2) for length in lengths]
    assert shares == [0.0, 0.0, 0.5, 1.0, 1.0]
    assert [overlong_penalty(n, max_tokens=10, buffer=0) for n in (9, 10)] == [0.0, 1.0]


def test_long_calls_lose_their_part_and_rollouts_keep_their_reward():
    long, short = transition([1], [2] * 9, reward=0.25), transition([1], [2])
    algorithm = AlgorithmConfig(overlong_penalty=0.5, overlong_max_tokens=10, overlong_buffer=2)
    (shaped,), metrics = punish_overlong([trajectory(long, short, reward=1.0)], algorithm)
    assert [call.reward for call in shaped.transitions] == [0.0, 0.0]
    assert shaped.reward == 1.0
    assert metrics == {"train/overlong_penalty_mean": 0.125}
    empty = punish_overlong([trajectory()], algorithm)
    assert empty == ([trajectory()], {"train/overlong_penalty_mean": 0.0})


def test_a_calls_own_limit_is_what_is_too_long():
    """The limit is 20 tokens with a buffer of 4, whatever other calls may sample."""
    lengths = (15, 16, 18, 20)
    limited = [replace(transition([1], [2] * n), max_tokens=20) for n in lengths]
    free = replace(transition([1], [2] * 90), max_tokens=1000)
    unknown = replace(transition([1], [2] * 3), finish_reason="length")
    (shaped,), _ = punish_overlong(
        [trajectory(*limited, free, unknown)], AlgorithmConfig(overlong_penalty=1.0)
    )
    assert [call.reward for call in shaped.transitions] == [0.0, 0.0, -0.5, -1.0, 0.0, -1.0]


def test_calls_that_a_limit_cut_are_left_out():
    whole, cut = transition([1], [2]), replace(transition([1], [3]), finish_reason="length")
    kept, values, number = drop_overlong(
        [trajectory(whole, cut), trajectory(cut)], [(1.0, 2.0), (3.0,)]
    )
    assert ([t.transitions for t in kept], values, number) == ([(whole,), ()], [(1.0,), ()], 2)
