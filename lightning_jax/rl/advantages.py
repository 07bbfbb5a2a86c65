"""Advantages: how much better a call did than rollouts usually do."""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from lightning_jax.config import AlgorithmConfig
from lightning_jax.rl.credit import assign_credit, credit_at, rollout_return
from lightning_jax.rl.values import CallValues
from lightning_jax.types import Advantage, Trajectory

# Returns of a group that differ by less than this, relative to the largest, count as equal, and so
# do a credit and its baseline: they differ by rounding, and dividing by the standard deviation of
# such returns would blow the rounding up to advantages of 1.
EQUAL_RETURNS = 1e-6


def group_baselines(returns: Float[np.ndarray, " N"], kind: str) -> Float[np.ndarray, " N"]:
    """What is subtracted from the credits of each rollout of one group, in reward units.

    "group_mean": the mean return of the group (GRPO, arXiv 2402.03300). "leave_one_out": the mean
    of its other rollouts (RLOO, arXiv 2402.14740); a rollout alone has itself.
    """
    if kind == "leave_one_out" and len(returns) > 1:
        return (returns.sum() - returns) / (len(returns) - 1)
    return np.full_like(returns, returns.mean())


def baselines_and_scales(
    returns: Float[np.ndarray, " N"], group_ids: Sequence[str], *, baseline: str, normalize: str
) -> tuple[Float[np.ndarray, " N"], Float[np.ndarray, " N"]]:
    """(baseline, scale) of each rollout; a credit's advantage is `(credit - baseline) * scale`.

    The baseline is that of the group, the mean over the step ("batch_mean", REINFORCE++, arXiv
    2501.03262) or 0 ("none"). The scale is one over the standard deviation of the group's returns
    ("group_std"), one over that of all returns less their baselines ("batch_std"), or 1 ("none",
    as in Dr. GRPO, arXiv 2503.20783); deviations are those of the population. Against a group's
    baseline one rollout says nothing about which call was better: scale 0. So it is wherever the
    deviation to divide by is 0. Equal returns by themselves are no reason: under per-step and
    learned credit their calls can differ, and to leave out the groups in which chance made the
    returns equal would bias the gradient.
    """
    baselines, scales = np.zeros_like(returns), np.ones_like(returns)
    for members in group_members(group_ids).values():
        group = returns[members]
        if baseline in ("group_mean", "leave_one_out"):
            baselines[members] = group_baselines(group, baseline)
            scales[members] = 0.0 if len(group) == 1 else 1.0
        if normalize == "group_std":
            scales[members] = 0.0 if are_equal(group) else 1.0 / group.std()
    if baseline == "batch_mean" and len(returns):
        baselines[:] = returns.mean()
    if normalize == "batch_std" and len(returns):
        centred = returns - baselines
        scales *= 0.0 if are_equal(centred) else 1.0 / centred.std()
    return baselines, scales


def difference(credit: float, baseline: float) -> float:
    """Their difference, 0 where it is rounding."""
    apart = credit - baseline
    return 0.0 if abs(apart) <= EQUAL_RETURNS * max(1.0, abs(credit)) else apart


def are_equal(returns: Float[np.ndarray, " N"]) -> bool:
    """Whether returns are the same up to rounding; one alone is."""
    spread = returns.max() - returns.min()
    return bool(spread <= EQUAL_RETURNS * max(1.0, float(np.abs(returns).max())))


def equal_groups(trajectories: Sequence[Trajectory], algorithm: AlgorithmConfig) -> set[str]:
    """The ids of the groups whose returns are all equal."""
    returns = returns_of(trajectories, algorithm)
    groups = group_members([trajectory.group_id for trajectory in trajectories])
    return {group for group, members in groups.items() if are_equal(returns[members])}


def group_metrics(
    trajectories: Sequence[Trajectory], algorithm: AlgorithmConfig
) -> dict[str, float]:
    """How many groups a step has, in how many of them nothing can be told apart, and in how many
    the rewards of calls alone tell rollouts apart, none of which did better than another.
    """
    rewards = np.asarray([trajectory.reward for trajectory in trajectories], np.float64)
    groups = group_members([trajectory.group_id for trajectory in trajectories])
    equal = equal_groups(trajectories, algorithm)
    by_calls = [
        group
        for group, members in groups.items()
        if group not in equal and are_equal(rewards[members])
    ]
    return {
        "train/num_groups": float(len(groups)),
        "train/equal_groups_share": len(equal) / max(len(groups), 1),
        "train/only_call_rewards_share": len(by_calls) / max(len(groups), 1),
    }


def step_advantages(
    trajectories: Sequence[Trajectory],
    algorithm: AlgorithmConfig,
    values: Sequence[Sequence[CallValues]] | None = None,
) -> tuple[list[tuple[Advantage, ...]], dict[str, float]]:
    """(one tuple per trajectory with one advantage per transition, metrics of the step).

    A call's baseline is made of one number of each rollout, its credit at the same turn, so that
    later calls, which have less to earn, are not blamed for it. A rollout that ended before counts
    with its last credit and one without calls with its reward, so what a call is compared with does
    not hang on who got that far, and the gradient stays unbiased. Under identical credit it is the
    same for all calls of a rollout; of learned credit it mends what the critic gets wrong on
    average. Deviations are those of returns. `values` are the critic's, None for 0. Of turn_groups
    see `turn_advantages`.
    """
    knobs = {
        "scheme": algorithm.credit,
        "discount": algorithm.discount,
        "gae_lambda": algorithm.gae_lambda,
    }
    known = [None] * len(trajectories) if values is None else values
    credits = [
        assign_credit(trajectory, values=of_calls, **knobs)
        for trajectory, of_calls in zip(trajectories, known, strict=True)
    ]
    if algorithm.credit == "turn_groups":
        advantages = turn_advantages(trajectories, credits, algorithm)
    else:
        advantages = _rollout_advantages(trajectories, credits, algorithm)
    sizes = [abs(each) for calls in advantages for call in calls for each in _of_tokens(call)]
    return advantages, group_metrics(trajectories, algorithm) | {
        "train/advantage_abs_mean": sum(sizes) / max(len(sizes), 1),
    }


def turn_advantages(
    trajectories: Sequence[Trajectory],
    credits: Sequence[tuple[Advantage, ...]],
    algorithm: AlgorithmConfig,
) -> list[tuple[Advantage, ...]]:
    """Each call compared with the calls of its group at the same turn, as if they were rollouts of
    a group of their own.

    Biased where agents choose when to stop, also with `leave_one_out` and without `normalize`: how
    many rollouts reach a turn is then up to the policy, and a call's own return is a part of what
    it is compared with (alone at its turn it is all of it, and the advantage is 0). So the later a
    turn and the fewer get there, the less of its gradient is left. A baseline that is one number
    for all calls of a rollout shrinks all of them alike.
    """
    flat: list[Any] = [credit for calls in credits for credit in calls]
    turns = [
        f"{trajectory.group_id}/{turn}"
        for trajectory, calls in zip(trajectories, credits, strict=True)
        for turn in range(len(calls))
    ]
    baselines, scales = baselines_and_scales(
        np.asarray(flat, np.float64),
        turns,
        baseline=algorithm.baseline,
        normalize=algorithm.normalize,
    )
    rest = iter(
        [
            difference(*pair) * scale
            for *pair, scale in zip(flat, baselines.tolist(), scales.tolist(), strict=True)
        ]
    )
    return [tuple(itertools.islice(rest, len(calls))) for calls in credits]


def _rollout_advantages(
    trajectories: Sequence[Trajectory],
    credits: Sequence[tuple[Advantage, ...]],
    algorithm: AlgorithmConfig,
) -> list[tuple[Advantage, ...]]:
    group_ids = [trajectory.group_id for trajectory in trajectories]
    knobs = {"baseline": algorithm.baseline, "normalize": algorithm.normalize}
    pairs = list(zip(credits, trajectories, strict=True))
    baselines = []
    for turn in range(max(map(len, credits), default=0)):
        at_turn = np.asarray([credit_at(turn, *pair) for pair in pairs], np.float64)
        baselines.append(baselines_and_scales(at_turn, group_ids, **knobs)[0].tolist())
    # Of returns, not of credits: below lambda 1 those hardly differ in a long rollout.
    _, scales = baselines_and_scales(returns_of(trajectories, algorithm), group_ids, **knobs)

    def advantage(credit: Advantage, baseline: float, scale: float) -> Advantage:
        if isinstance(credit, tuple):
            return tuple(difference(each, baseline) * scale for each in credit)
        return difference(credit, baseline) * scale

    return [
        tuple(advantage(credit, baselines[turn][i], scale) for turn, credit in enumerate(calls))
        for i, (calls, scale) in enumerate(zip(credits, scales.tolist(), strict=True))
    ]


def _of_tokens(advantage: Advantage) -> tuple[float, ...]:
    return advantage if isinstance(advantage, tuple) else (advantage,)


def returns_of(
    trajectories: Sequence[Trajectory], algorithm: AlgorithmConfig
) -> Float[np.ndarray, " N"]:
    """What each rollout earned, float64, whatever a critic thinks of it."""
    scheme, discount = algorithm.credit, algorithm.discount
    earned = [rollout_return(each, scheme=scheme, discount=discount) for each in trajectories]
    return np.asarray(earned, np.float64)


def group_members(group_ids: Sequence[str]) -> dict[str, list[int]]:
    """The places of each group's rollouts."""
    members: dict[str, list[int]] = defaultdict(list)
    for place, group_id in enumerate(group_ids):
        members[group_id].append(place)
    return members
