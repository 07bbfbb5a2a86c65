"""Advantages, which compare a call's credit with a baseline, and the pairs of rollouts for DPO."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from lightning_jax.models.policies import ALL, Policy, PolicyTable
from lightning_jax.rl.choices import check_shape, choose
from lightning_jax.rl.config import GROUP_BASELINES, AlgorithmConfig
from lightning_jax.rl.credit import Credit, assign_credit, credit_at
from lightning_jax.rl.token_weights import drop_stale, num_trained
from lightning_jax.types import FULL_REWARD, Advantage, Trajectory

Returns = Float[np.ndarray, " N"]
# From the returns of a step's rollouts and the ids of their groups to the baseline of each.
Baseline = Callable[[Returns, Sequence[str]], Returns]

# Relative difference up to which a group's returns, or a credit and its baseline, count as equal.
# Such a difference is rounding error. Dividing by the standard deviation of such returns would
# inflate the error to advantages of 1.
EQUAL_RETURNS = 1e-6
Pair = tuple[int, int]  # indices of the chosen and of the rejected rollout


def per_group(of_group: Callable[[Returns], Any]) -> Baseline:
    """Build a baseline from a function of one group's returns.

    The function returns one number for the group, or one for each of its rollouts.
    """

    def baseline(returns: Returns, group_ids: Sequence[str]) -> Returns:
        baselines = np.zeros_like(returns)
        for members in group_members(group_ids).values():
            baselines[members] = of_group(returns[members])
        return baselines

    return baseline


group_mean = per_group(np.mean)  # GRPO, arXiv 2402.03300


@per_group
def leave_one_out(group: Returns) -> Returns:
    """Return the mean of the group's other rollouts, or a lone rollout's own return.

    From RLOO (arXiv 2402.14740).
    """
    return (group.sum() - group) / (len(group) - 1) if len(group) > 1 else group


def batch_mean(returns: Returns, group_ids: Sequence[str]) -> Returns:
    """Return the mean over the step (REINFORCE++, arXiv 2501.03262)."""
    return np.full_like(returns, returns.sum() / max(len(returns), 1))


BASELINES: dict[str, Callable[[AlgorithmConfig], Baseline]] = {
    "group_mean": lambda _: group_mean,
    "leave_one_out": lambda _: leave_one_out,
    "batch_mean": lambda _: batch_mean,
    "none": lambda _: lambda returns, group_ids: np.zeros_like(returns),
}


def baselines_of(returns: Returns, group_ids: Sequence[str], algorithm: AlgorithmConfig) -> Returns:
    """Return the baseline of each rollout by `algorithm.baseline`, in reward units."""
    baseline = choose(algorithm, "baseline", BASELINES)
    baselines = np.asarray(baseline(returns, group_ids), np.float64)
    check_shape(baseline, "baseline", baselines, returns.shape)
    return baselines


def scales_of(returns: Returns, group_ids: Sequence[str], algorithm: AlgorithmConfig) -> Returns:
    """Return the scale of each rollout; the advantage is `(credit - baseline) * scale`.

    With `normalize` "group_std" the scale is one over the population standard deviation of the
    group's returns. With "batch_std" the deviation is that of all returns minus their baselines.
    With "none" the scale is 1 (as in Dr. GRPO, arXiv 2503.20783).

    The scale is 0 for a single rollout with a group baseline, which cannot show which call was
    better. It is also 0 if the standard deviation is 0. Equal returns alone do not make it 0. With
    per-step and learned credit their calls can differ, and dropping groups whose returns are equal
    by chance would bias the gradient.
    """
    scales = np.ones_like(returns)
    for members in group_members(group_ids).values():
        group = returns[members]
        if len(group) == 1 and algorithm.baseline in GROUP_BASELINES:
            scales[members] = 0.0
        if algorithm.normalize == "group_std":
            scales[members] = 0.0 if are_equal(group) else 1.0 / group.std()
    if algorithm.normalize == "batch_std" and len(returns):
        centred = returns - baselines_of(returns, group_ids, algorithm)
        scales *= 0.0 if are_equal(centred) else 1.0 / centred.std()
    return scales


def difference(credit: float, baseline: float) -> float:
    """Return credit minus baseline, or 0 if the difference is only rounding error."""
    gap = credit - baseline
    return 0.0 if abs(gap) <= EQUAL_RETURNS * max(1.0, abs(credit)) else gap


def stands_out(value: float, group: Returns) -> bool:
    """Return whether a return is above the mean of its group, or that of a task fully right.

    Otherwise the best attempt of a group in which nobody solved the task may be one that earned
    only a reward for its form, which all earned.
    """
    return bool(difference(value, float(group.mean())) > 0 or value >= FULL_REWARD)


def are_equal(returns: Returns) -> bool:
    """Return whether all returns are equal up to rounding error."""
    value_range = returns.max() - returns.min()
    return bool(value_range <= EQUAL_RETURNS * max(1.0, float(np.abs(returns).max())))


def equal_groups(credit: Credit) -> set[str]:
    """Return the ids of the groups whose returns are all equal."""
    groups = group_members([trajectory.group_id for trajectory in credit.trajectories])
    return {group for group, members in groups.items() if are_equal(credit.returns[members])}


def without_equal_groups(
    trajectories: Sequence[Trajectory], algorithm: AlgorithmConfig
) -> list[Trajectory]:
    """Return the trajectories of groups whose returns differ (dynamic sampling, DAPO)."""
    equal = equal_groups(assign_credit(trajectories, algorithm))
    return [trajectory for trajectory in trajectories if trajectory.group_id not in equal]


def group_metrics(credit: Credit) -> dict[str, float]:
    """Return a step's number of groups and the shares of two kinds of group.

    One has equal returns. The other has equal rollout rewards but returns that differ through call
    rewards alone.
    """
    rewards = np.asarray([trajectory.reward for trajectory in credit.trajectories], np.float64)
    groups = group_members([trajectory.group_id for trajectory in credit.trajectories])
    equal = equal_groups(credit)
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
    credit: Credit, algorithm: AlgorithmConfig
) -> tuple[list[tuple[Advantage, ...]], dict[str, float]]:
    """Return (one tuple per trajectory with one advantage per transition, metrics of the step).

    A call's baseline uses one number of each rollout, its credit at the same turn. So later calls,
    which have less left to earn, are not blamed for that. A rollout that ended earlier counts with
    its last credit, and one without calls with its reward. The baseline then does not depend on
    which rollouts got that far, and the gradient stays unbiased.

    With identical credit, the baseline is the same for all calls of a rollout. With learned credit,
    it corrects the critic's average error. Standard deviations are those of returns. For
    turn_groups see `turn_advantages`, for the loss "raft" `best_of_group`.
    """
    if algorithm.loss == "raft":
        advantages = best_of_group(credit, algorithm.raft_min_return)
    elif algorithm.credit == "turn_groups":
        advantages = turn_advantages(credit, algorithm)
    else:
        advantages = _rollout_advantages(credit, algorithm)
    sizes = [
        abs(value)
        for calls in advantages
        for call in calls
        for value in (call if isinstance(call, tuple) else (call,))
    ]
    return advantages, group_metrics(credit) | {
        "train/advantage_abs_mean": sum(sizes) / max(len(sizes), 1),
    }


def best_of_group(credit: Credit, min_return: float) -> list[tuple[Advantage, ...]]:
    """Give the calls of each group's best rollout advantage 1, and all others 0.

    So the policy learns the best attempt as if it were a demonstration (RAFT, arXiv 2304.06767;
    expert iteration, arXiv 1705.08439). Of equal ones the first counts. A group has no best rollout
    if none has calls, a return above `min_return` and one that `stands_out`.
    """
    best: set[int] = set()
    for members in group_members([t.group_id for t in credit.trajectories]).values():
        able = [i for i in members if credit.calls[i] and credit.returns[i] > min_return]
        first = max(able, key=credit.returns.__getitem__, default=None)
        if first is not None and stands_out(credit.returns[first], credit.returns[members]):
            best.add(first)
    return [(float(i in best),) * len(calls) for i, calls in enumerate(credit.calls)]


def turn_advantages(credit: Credit, algorithm: AlgorithmConfig) -> list[tuple[Advantage, ...]]:
    """Compare each call with its group's calls at the same turn, as if they were a separate group.

    This is biased if agents choose when to stop, even with `leave_one_out` and without `normalize`.
    The policy then decides how many rollouts reach a turn, and a call's own return is part of its
    baseline. A call alone at its turn is its own baseline and has advantage 0. So the fewer
    rollouts reach a turn, the less of its gradient is left. A baseline that is one number for all
    calls of a rollout shrinks them all equally.
    """
    flat: list[Any] = [value for calls in credit.calls for value in calls]
    turns = [
        f"{trajectory.group_id}/{turn}"
        for trajectory, calls in zip(credit.trajectories, credit.calls, strict=True)
        for turn in range(len(calls))
    ]
    returns = np.asarray(flat, np.float64)
    baselines = baselines_of(returns, turns, algorithm).tolist()
    scales = scales_of(returns, turns, algorithm).tolist()
    rest = iter(
        [
            difference(value, baseline) * scale
            for value, baseline, scale in zip(flat, baselines, scales, strict=True)
        ]
    )
    return [tuple(itertools.islice(rest, len(calls))) for calls in credit.calls]


def _rollout_advantages(credit: Credit, algorithm: AlgorithmConfig) -> list[tuple[Advantage, ...]]:
    group_ids = [trajectory.group_id for trajectory in credit.trajectories]
    pairs = list(zip(credit.calls, credit.trajectories, strict=True))
    baselines = []
    for turn in range(max(map(len, credit.calls), default=0)):
        at_turn = np.asarray([credit_at(turn, *pair) for pair in pairs], np.float64)
        baselines.append(baselines_of(at_turn, group_ids, algorithm).tolist())
    # Scales come from returns. With lambda below 1, credits hardly differ in a long rollout.
    scales = scales_of(credit.returns, group_ids, algorithm).tolist()

    def advantage(credit: Advantage, baseline: float, scale: float) -> Advantage:
        if isinstance(credit, tuple):
            return tuple(difference(value, baseline) * scale for value in credit)
        return difference(credit, baseline) * scale

    return [
        tuple(advantage(value, baselines[turn][i], scale) for turn, value in enumerate(calls))
        for i, (calls, scale) in enumerate(zip(credit.calls, scales, strict=True))
    ]


def group_members(group_ids: Sequence[str]) -> dict[str, list[int]]:
    """Return the indices of each group's rollouts."""
    members: dict[str, list[int]] = defaultdict(list)
    for index, group_id in enumerate(group_ids):
        members[group_id].append(index)
    return members


def make_pairs(
    credit: Credit, algorithm: AlgorithmConfig, *, policy_version: int
) -> tuple[list[Pair], int]:
    """Return (the pairs of a step, number of stale calls).

    In each group the best rollout is paired with the worst, the second best with the second worst,
    and so on while returns differ. A rollout is in at most one pair. A rollout with a stale call
    or without a trained token is not paired.
    """
    trajectories, returns = credit.trajectories, credit.returns
    fresh, _, num_stale = drop_stale(
        trajectories,
        [trajectory.transitions for trajectory in trajectories],
        policy_version=policy_version,
        max_staleness=algorithm.max_staleness,
    )
    usable = [
        len(kept.transitions) == len(whole.transitions) and any(map(num_trained, kept.transitions))
        for kept, whole in zip(fresh, trajectories, strict=True)
    ]
    pairs = []
    for members in group_members([trajectory.group_id for trajectory in trajectories]).values():
        ranked = sorted(filter(usable.__getitem__, members), key=lambda index: -returns[index])
        for chosen, rejected in zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False):
            if not are_equal(returns[[chosen, rejected]]):
                pairs.append((chosen, rejected))
    return pairs, num_stale


def pair_signs(
    trajectories: Sequence[Trajectory], pairs: Sequence[Pair]
) -> list[tuple[float, ...]]:
    """Return for each call 1 if its rollout is chosen, -1 if it is rejected, otherwise 0."""
    signs = np.zeros(len(trajectories))
    for chosen, rejected in pairs:
        signs[chosen], signs[rejected] = 1.0, -1.0
    return [
        (float(sign),) * len(trajectory.transitions)
        for sign, trajectory in zip(signs, trajectories, strict=True)
    ]


def learners(algorithm: AlgorithmConfig, policies: PolicyTable) -> tuple[Policy, ...]:
    """Return the policies that learn from their own calls, or `ALL` if they learn jointly."""
    if algorithm.policy_updates == "joint" or not policies.named:
        return (ALL,)
    return tuple(policy for policy in policies.named.values() if policy.trains)
