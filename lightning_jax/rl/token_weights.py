"""Weight of each token in the loss of a step, and calls that are too old to have one."""

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from lightning_jax.errors import InvalidValue
from lightning_jax.rl.sequence import StateValues, TrainingSequence
from lightning_jax.types import Trajectory, Transition


def token_weights(
    trajectories: Sequence[Trajectory], *, aggregation: str = "rollout", divisor: float = 1.0
) -> list[tuple[float, ...]]:
    """Return one tuple per trajectory, with the weight of a trained token of each call.

    Weights sum to 1 over the step, except for "constant". Rollouts and calls without a trained
    token do not count. Raises ValueError for another aggregation.

    "rollout": rollouts have equal weight, and so do the tokens of one rollout (GRPO, arXiv
    2402.03300, where a rollout is one call). "call": calls have equal weight, and so do the tokens
    of one call. "token": all tokens have equal weight (DAPO, arXiv 2503.14476). "constant": 1 /
    (`divisor` * rollouts), so longer rollouts have more weight (Dr. GRPO, arXiv 2503.20783).
    """
    counts = [[num_trained(call) for call in t.transitions] for t in trajectories]
    totals = [sum(calls) for calls in counts]
    num_rollouts = sum(total > 0 for total in totals)
    num_calls = sum(count > 0 for calls in counts for count in calls)
    if aggregation == "rollout":
        shares = [[total * num_rollouts] * len(c) for c, total in zip(counts, totals, strict=True)]
    elif aggregation == "call":
        shares = [[count * num_calls for count in calls] for calls in counts]
    elif aggregation == "token":
        shares = [[sum(totals)] * len(calls) for calls in counts]
    elif aggregation == "constant":
        return [(1.0 / (divisor * max(num_rollouts, 1)),) * len(calls) for calls in counts]
    else:
        raise InvalidValue.unknown(
            "aggregation",
            f"aggregation is {aggregation!r}; expected rollout, token, call or constant.",
        )
    return [tuple(1.0 / max(share, 1) for share in calls) for calls in shares]


def weigh_states(
    states: Sequence[tuple[StateValues | None, ...]],
) -> list[tuple[StateValues | None, ...]]:
    """Give all states of the step equal weights that sum to 1."""
    number = sum(len(state.positions) for calls in states for state in calls if state is not None)
    return [
        tuple(state and replace(state, weight=1.0 / max(number, 1)) for state in calls)
        for calls in states
    ]


def num_trained(transition: Transition) -> int:
    """Return the number of tokens that the policy chose. A grammar forced the others."""
    return transition.forced.count(False)


def split_minibatches(
    sequences: Sequence[TrainingSequence], number: int, seed: str = "", *, grows: bool = True
) -> list[list[TrainingSequence]]:
    """Split the sequences into `number` random, non-empty parts of about equal size.

    Groups stay whole, so their common prefixes are still shared. With fewer groups than parts, only
    rollouts stay whole. There are at most as many parts as rollouts. Weights are multiplied by the
    number of parts, so that a part's gradient is on average as large as that of the whole step.
    With `grows=False` they were already.
    """
    if number == 1 or not sequences:
        return [list(sequences)]
    units = _units(sequences, "group")
    if len(units) < number:
        units = _units(sequences, "rollout")
    number = min(number, len(units))
    random.Random(seed).shuffle(units)
    ends = list(itertools.accumulate(map(len, units)))
    cuts = [0]
    for k in range(1, number):
        # The end nearest to an equal share that leaves a unit for this part and each later one.
        choices = range(cuts[-1] + 1, len(units) - (number - k) + 1)
        share = k * len(sequences) / number
        cuts.append(min(choices, key=lambda cut: abs(ends[cut - 1] - share)))
    return [
        [
            _grown(sequence, number) if grows else sequence
            for unit in units[start:end]
            for sequence in unit
        ]
        for start, end in itertools.pairwise([*cuts, len(units)])
    ]


def _units(sequences: Sequence[TrainingSequence], name: str) -> list[list[TrainingSequence]]:
    """Return the sequences of each group or rollout. A sequence without one is a unit by itself."""
    units: dict[object, list[TrainingSequence]] = {}
    for index, sequence in enumerate(sequences):
        of = getattr(sequence, name)
        units.setdefault((index,) if of is None else of, []).append(sequence)
    return list(units.values())


def _grown(sequence: TrainingSequence, factor: int) -> TrainingSequence:
    states = sequence.states
    if states is not None:
        states = replace(states, weight=states.weight * factor)
    return replace(sequence, weight=sequence.weight * factor, states=states)


def is_stale(call: Transition, *, policy_version: int, max_staleness: int) -> bool:
    """Return True if the call's oldest token is more than `max_staleness` trainer steps old."""
    return policy_version - min(call.policy_versions, default=policy_version) > max_staleness


def newest_version(calls: Iterable[Transition]) -> int | None:
    """Return the weights version of the call that is stale last, or None without a trained call.

    Once this version is too old, nothing can be learned from the calls.
    """
    versions = [min(call.policy_versions) for call in calls if call.trains and call.policy_versions]
    return max(versions, default=None)


def drop_calls(
    trajectories: Sequence[Trajectory],
    values: Sequence[tuple[Any, ...]],
    is_dropped: Callable[[Transition], bool],
) -> tuple[list[Trajectory], list[tuple[Any, ...]], int]:
    """Drop some calls and return (trajectories, values, number of calls dropped).

    `values` may hold any one value per call. Compute advantages first, because a dropped call still
    counts in its rollout's return.
    """
    kept_trajectories, kept_values, num_dropped = [], [], 0
    for trajectory, of_calls in zip(trajectories, values, strict=True):
        pairs = zip(trajectory.transitions, of_calls, strict=True)
        pairs = [(call, value) for call, value in pairs if not is_dropped(call)]
        num_dropped += len(of_calls) - len(pairs)
        kept_trajectories.append(replace(trajectory, transitions=tuple(call for call, _ in pairs)))
        kept_values.append(tuple(value for _, value in pairs))
    return kept_trajectories, kept_values, num_dropped


def drop_stale(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[tuple[Any, ...]],
    *,
    policy_version: int,
    max_staleness: int,
) -> tuple[list[Trajectory], list[tuple[Any, ...]], int]:
    """Return `drop_calls` of stale calls.

    A call's staleness is that of its oldest token, in trainer steps before `policy_version`.
    """
    limits = {"policy_version": policy_version, "max_staleness": max_staleness}
    return drop_calls(trajectories, advantages, lambda call: is_stale(call, **limits))
