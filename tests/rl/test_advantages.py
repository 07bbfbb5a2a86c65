import numpy as np
import pytest

from lightning_jax.rl import advantages as rl_advantages
from lightning_jax.rl.advantages import (
    baselines_of,
    equal_groups,
    make_pairs,
    pair_signs,
    scales_of,
)
from lightning_jax.rl.config import AlgorithmConfig
from lightning_jax.rl.credit import assign_credit
from lightning_jax.testing.records import trajectory, transition

DPO = AlgorithmConfig(loss="dpo", dpo_beta=0.5)


def step_advantages(step, algorithm, values=None):
    return rl_advantages.step_advantages(assign_credit(step, algorithm, values), algorithm)


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


@pytest.mark.parametrize(
    ("rollouts", "expected"),
    [
        (((1.0, 1), (0.25, 1)), [(0.375,), (-0.375,)]),
        # The mean over calls would be 3 / 4. Over rollouts it is 1 / 2.
        (((1.0, 3), (0.0, 1)), [(0.5, 0.5, 0.5), (-0.5,)]),
        (((1.0, 1), (0.0, 0)), [(0.5,), ()]),
    ],
)
def test_without_std_the_advantage_is_reward_minus_the_mean_over_rollouts(rollouts, expected):
    attempts = [rollout(reward, calls=calls) for reward, calls in rollouts]
    assert step_advantages(attempts, AlgorithmConfig(normalize="none"))[0] == expected


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


def test_groups_that_only_the_rewards_of_calls_tell_apart():
    def called(reward: float, of_call: float, group: str):
        return trajectory(transition([1], [2], reward=of_call), reward=reward, group=group)

    step = [called(0.0, -0.1, "by calls"), called(0.0, 0.0, "by calls")]
    step += [called(1.0, -0.1, "by both"), called(0.0, 0.0, "by both")]
    step += [called(0.0, -0.1, "equal"), called(0.0, -0.1, "equal")]
    step += [called(1.0, -1.0, "cancelled"), called(0.0, 0.0, "cancelled")]
    _, metrics = step_advantages(step, AlgorithmConfig())
    assert metrics["train/only_call_rewards_share"] == 0.25
    assert metrics["train/equal_groups_share"] == 0.5


def test_equal_up_to_rounding_is_equal():
    returns = np.asarray([0.1 + 0.2, 0.3])
    inputs = returns, ["g", "g"], AlgorithmConfig()
    assert baselines_of(*inputs) == pytest.approx([0.3, 0.3])
    assert scales_of(*inputs).tolist() == [0.0, 0.0]


def test_per_step_credit_is_compared_with_the_group_at_the_same_turn():
    # With discount 0.5 the credits are 0.5, 1 and 0, and means are 0.25 and 0.5. A rollout that
    # ended earlier counts with its last credit.
    step = [rollout(1.0, calls=2), rollout(0.0)]
    config = AlgorithmConfig(credit="per_step", discount=0.5, normalize="none")
    assert step_advantages(step, config)[0] == [(0.25, 0.5), (-0.25,)]


def test_later_calls_are_not_blamed_for_what_is_earned_already():
    # The calls of the first rollout earn 1 and 1, those of the second 0 and 1. Returns to go are
    # 2, 1 and 1, 1.
    step = [
        trajectory(*[transition([1], [2], reward=r) for r in (1.0, 1.0)]),
        trajectory(*[transition([1], [2], reward=r) for r in (0.0, 1.0)]),
        rollout(0.0, calls=0),
    ]
    for baseline, wanted in {
        "group_mean": [(1.0, 1 / 3), (0.0, 1 / 3), ()],
        "leave_one_out": [(1.5, 0.5), (0.0, 0.5), ()],
    }.items():
        config = AlgorithmConfig(credit="per_step", normalize="none", baseline=baseline)
        assert step_advantages(step, config)[0] == [pytest.approx(row) for row in wanted]


def test_no_rollouts_at_all():
    assert step_advantages([], AlgorithmConfig())[0] == []


def of_group(*rewards: float, group: str = "g"):
    return [rollout(reward, group=group) for reward in rewards]


def test_leave_one_out_by_hand():
    # The means of the others are 1, 1.5 and 0.5. A single rollout has advantage 0.
    step = [*of_group(1.0, 0.0, 2.0), rollout(5.0, group="single")]
    config = AlgorithmConfig(baseline="leave_one_out", normalize="none")
    advantages, _ = step_advantages(step, config)
    assert advantages == [(0.0,), (-1.5,), (1.5,), (0.0,)]


def test_batch_mean_and_std_by_hand():
    # Returns 3, 1 | 1, 1: mean 1.5, differences 1.5, -0.5, -0.5, -0.5. The standard deviation is
    # the square root of (2.25 + 3 * 0.25) / 4 = 0.75. Equal groups keep their advantage.
    step = [*of_group(3.0, 1.0), *of_group(1.0, 1.0, group="equal")]
    config = AlgorithmConfig(baseline="batch_mean", normalize="batch_std")
    (first, *others), metrics = step_advantages(step, config)
    assert first == (pytest.approx(1.5 / 0.75**0.5),)
    assert others == [(pytest.approx(-0.5 / 0.75**0.5),)] * 3
    assert metrics["train/equal_groups_share"] == 0.5


def test_group_mean_over_batch_std_by_hand():
    # Returns minus their groups' means are 1, -1, 0.5, -0.5. Standard deviation sqrt(2.5 / 4).
    step = [*of_group(3.0, 1.0), *of_group(1.0, 0.0, group="b")]
    advantages, _ = step_advantages(step, AlgorithmConfig(normalize="batch_std"))
    scale = (4 / 2.5) ** 0.5
    assert [a for (a,) in advantages] == pytest.approx([scale, -scale, scale / 2, -scale / 2])


def test_no_baseline_leaves_the_return():
    config = AlgorithmConfig(baseline="none", normalize="none")
    assert step_advantages(of_group(1.0, 1.0), config)[0] == [(1.0,), (1.0,)]


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out", "batch_mean", "none"])
@pytest.mark.parametrize("normalize", ["group_std", "batch_std", "none"])
def test_every_choice_is_finite_on_nothing_on_one_and_on_equals(baseline, normalize):
    config = AlgorithmConfig(baseline=baseline, normalize=normalize)
    assert step_advantages([], config)[0] == []
    step = [rollout(0.1 + 0.2, calls=0), rollout(0.3), rollout(7.0, group="single")]
    advantages, _ = step_advantages(step, config)
    assert [len(calls) for calls in advantages] == [0, 1, 1]
    assert np.isfinite([a for calls in advantages for a in calls]).all()


def test_the_best_of_each_group_alone_is_learned():
    step = [
        rollout(0.5, calls=2, group="a"),
        rollout(0.6, calls=0, group="a"),  # has nothing to learn from
        rollout(0.3, group="a"),
        rollout(0.2, group="b"),
        rollout(0.0, group="c"),
        rollout(0.3, group="b"),
        rollout(0.0, group="c"),
        rollout(0.4, group="d"),
        rollout(0.4, group="d"),
    ]
    advantages, metrics = step_advantages(step, AlgorithmConfig(loss="raft"))
    assert advantages == [(1, 1), (), (0,), (0,), (0,), (1,), (0,), (0,), (0,)]
    assert metrics["train/advantage_abs_mean"] == 3 / 9
    few, _ = step_advantages(step, AlgorithmConfig(loss="raft", raft_min_return=0.4))
    assert few == [(1, 1), (), (0,), (0,), (0,), (0,), (0,), (0,), (0,)]
    assert step_advantages([], AlgorithmConfig(loss="raft"))[0] == []


@pytest.mark.parametrize(
    ("returns", "best"),
    [
        ((0.1, 0.1, 0.1), None),  # all earned the form alone
        ((0.1, 0.1, 0.0), 0),  # mean 0.0667
        ((1.0, 1.0), 0),  # all are right
        ((1.0 - 1e-7,), 0),  # up to rounding
        ((0.9,), None),  # above nothing
        ((0.1 + 0.2, 0.3), None),  # equal up to rounding
        ((-0.2, -0.4), None),  # not above raft_min_return
    ],
)
def test_the_best_is_learned_if_it_beats_its_group_or_is_right(returns, best):
    advantages, _ = step_advantages(list(map(rollout, returns)), AlgorithmConfig(loss="raft"))
    assert advantages == [(float(i == best),) for i in range(len(returns))]


def test_the_best_with_calls_is_not_learned_below_the_mean_of_its_group():
    step = [rollout(0.5), rollout(0.9, calls=0), rollout(0.4)]  # mean 0.6
    assert step_advantages(step, AlgorithmConfig(loss="raft"))[0] == [(0,), (), (0,)]


def test_equal_groups_are_named():
    step = [*of_group(1.0, 0.0), *of_group(0.5, 0.5, group="equal"), rollout(1.0, group="single")]
    assert equal_groups(assign_credit(step, AlgorithmConfig())) == {"equal", "single"}
    assert equal_groups(assign_credit([], AlgorithmConfig())) == set()


def test_turns_are_compared_with_their_like():
    # Returns to go are 4, 2, 0 from the first turn and 3, 1 from the second. The third turn has
    # only one call.
    step = [
        trajectory(*[transition([1], [2], reward=r) for r in (1.0, 1.0)], reward=2.0),
        trajectory(*[transition([1], [2], reward=r) for r in (1.0, 1.0)]),
        rollout(0.0),
        rollout(9.0, calls=2, group="single"),
    ]
    config = AlgorithmConfig(credit="turn_groups", normalize="none")
    advantages, _ = step_advantages(step, config)
    assert advantages == [(2.0, 1.0), (0.0, -1.0), (-2.0,), (0.0, 0.0)]
    scaled, _ = step_advantages(step, AlgorithmConfig(credit="turn_groups"))
    assert scaled[1] == (0.0, -1.0)
    assert scaled[0] == (pytest.approx(1.5**0.5), 1.0)


def test_baselines_of_learned_credit_are_over_turns():
    # Credits 1 - 0.25, 1 - 0.5 and 0 - 0.25: means 0.25 at the first turn, 0.125 at the second.
    step = [rollout(1.0, calls=2), rollout(0.0)]
    values = [((0.25,), (0.5,)), ((0.25,),)]
    config = AlgorithmConfig(credit="learned", normalize="none")
    assert step_advantages(step, config, values)[0] == [(0.5, 0.375), (-0.5,)]
    scaled, metrics = step_advantages(step, AlgorithmConfig(credit="learned"), values)
    assert scaled == [(1.0, 0.75), (-1.0,)]
    assert metrics["train/advantage_abs_mean"] == pytest.approx(2.75 / 3)
    # With lambda 0 credits are 0.5 - 0.25, 1 - 0.5 and 0 - 0.25, with means 0 and 0.125. The
    # standard deviation is still that of the returns, 0.5.
    one_step = AlgorithmConfig(credit="learned", gae_lambda=0.0)
    assert step_advantages(step, one_step, values)[0] == [(0.5, 0.75), (-0.5,)]
    # For tokens: each call has one.
    tokens = AlgorithmConfig(credit="learned_token", normalize="none")
    assert step_advantages(step, tokens, values)[0] == [((0.5,), (0.375,)), ((-0.5,),)]


def test_equal_returns_say_something_of_calls():
    # Both rollouts earned 1, at the first and at the second call.
    step = [
        trajectory(transition([1], [2], reward=1.0), transition([1], [2])),
        trajectory(transition([1], [2]), transition([1], [2], reward=1.0)),
    ]
    config = AlgorithmConfig(credit="per_step", normalize="none")
    assert step_advantages(step, config)[0] == [(0.0, -0.5), (0.0, 0.5)]
    identical = AlgorithmConfig(normalize="none")
    assert step_advantages(step, identical)[0] == [(0.0, 0.0)] * 2


def paired(earned: float, *, group: str = "g", version: int = 9, **call):
    return trajectory(transition([1], [2], version=version, **call), reward=earned, group=group)


def test_the_best_are_paired_with_the_worst_of_their_group():
    step = [
        *(paired(reward) for reward in (1.0, 0.0, 0.5, 1.0, 0.0)),
        *(paired(0.3, group="equal") for _ in range(4)),
        paired(1.0, group="alone"),
        # A call's own reward also counts.
        paired(0.0, group="calls"), paired(0.0, group="calls", reward=-0.1),
    ]  # fmt: skip
    pairs, num_stale = make_pairs(assign_credit(step, DPO), DPO, policy_version=9)
    assert (pairs, num_stale) == ([(0, 4), (3, 1), (10, 11)], 0)
    signs = pair_signs(step, pairs)
    assert signs == [(1.0,), (-1.0,), (0.0,), (1.0,), (-1.0,), *[(0.0,)] * 5, (1.0,), (-1.0,)]


def test_what_cannot_be_compared_has_no_partner():
    step = [
        paired(1.0, version=3),  # six steps old
        trajectory(reward=0.9),  # made no call
        paired(0.8, forced=(True,)),  # no token was chosen
        paired(0.5),
        paired(0.0),
    ]
    assert make_pairs(assign_credit(step, DPO), DPO, policy_version=9) == ([(3, 4)], 1)
    assert make_pairs(assign_credit(step, DPO), DPO, policy_version=7) == ([(0, 4)], 0)
