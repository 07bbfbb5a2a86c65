"""Tests of the pairs of rollouts that DPO compares."""

from lightning_jax.rl.config import AlgorithmConfig
from lightning_jax.rl.credit import assign_credit
from lightning_jax.rl.pairs import make_pairs, pair_signs
from lightning_jax.testing.records import trajectory, transition

DPO = AlgorithmConfig(loss="dpo", dpo_beta=0.5)


def rollout(earned: float, *, group: str = "g", version: int = 9, **call):
    return trajectory(transition([1], [2], version=version, **call), reward=earned, group=group)


def test_the_best_are_paired_with_the_worst_of_their_group():
    step = [
        *(rollout(reward) for reward in (1.0, 0.0, 0.5, 1.0, 0.0)),
        *(rollout(0.3, group="equal") for _ in range(4)),
        rollout(1.0, group="alone"),
        # A call's own reward also counts.
        rollout(0.0, group="calls"), rollout(0.0, group="calls", reward=-0.1),
    ]  # fmt: skip
    pairs, num_stale = make_pairs(assign_credit(step, DPO), DPO, policy_version=9)
    assert (pairs, num_stale) == ([(0, 4), (3, 1), (10, 11)], 0)
    signs = pair_signs(step, pairs)
    assert signs == [(1.0,), (-1.0,), (0.0,), (1.0,), (-1.0,), *[(0.0,)] * 5, (1.0,), (-1.0,)]


def test_what_cannot_be_compared_has_no_partner():
    step = [
        rollout(1.0, version=3),  # six steps old
        trajectory(reward=0.9),  # made no call
        rollout(0.8, forced=(True,)),  # no token was chosen
        rollout(0.5),
        rollout(0.0),
    ]
    assert make_pairs(assign_credit(step, DPO), DPO, policy_version=9) == ([(3, 4)], 1)
    assert make_pairs(assign_credit(step, DPO), DPO, policy_version=7) == ([(0, 4)], 0)
