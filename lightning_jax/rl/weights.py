"""How much each token counts in the loss of a step, and of a part of it."""

import dataclasses
import itertools
from collections.abc import Sequence

from lightning_jax.types import StateValues, TrainingSequence, Trajectory, Transition


def token_weights(
    trajectories: Sequence[Trajectory], *, aggregation: str = "rollout", divisor: float = 1.0
) -> list[tuple[float, ...]]:
    """One tuple per trajectory with the weight of each trained token of each of its calls.

    Weights sum to 1 over the step, except those of "constant". Rollouts and calls without a trained
    token do not count. Raises ValueError for another aggregation.

    "rollout": rollouts weigh the same, and so do the tokens of one rollout (GRPO, arXiv 2402.03300,
    where a rollout is one call). "call": calls weigh the same, and so do the tokens of one call.
    "token": all tokens weigh the same (DAPO, arXiv 2503.14476). "constant": 1 / (`divisor` *
    rollouts), so a rollout weighs what it is long (Dr. GRPO, arXiv 2503.20783).
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
        raise ValueError(
            f"aggregation is {aggregation!r}; expected rollout, token, call or constant."
        )
    return [tuple(1.0 / max(share, 1) for share in calls) for calls in shares]


def weigh_states(
    states: Sequence[tuple[StateValues | None, ...]],
) -> list[tuple[StateValues | None, ...]]:
    """All states of the step with the same weight, together 1."""
    number = sum(len(each.positions) for calls in states for each in calls if each is not None)
    return [
        tuple(each and dataclasses.replace(each, weight=1.0 / max(number, 1)) for each in calls)
        for calls in states
    ]


def num_trained(transition: Transition) -> int:
    """Tokens of the call that the policy chose; a grammar forced the others."""
    return transition.forced.count(False)


def split_minibatches(
    sequences: Sequence[TrainingSequence], number: int
) -> list[list[TrainingSequence]]:
    """The sequences in `number` parts of about equal size, at most one per sequence.

    The parts are stretches, so that the rollouts of a group keep their prefixes in common. Weights
    grow by the number of parts: on average a part's gradient is as large as that of the whole.
    """
    number = max(min(number, len(sequences)), 1)
    cuts = [k * len(sequences) // number for k in range(number + 1)]
    return [
        [_grown(sequence, number) for sequence in sequences[start:end]]
        for start, end in itertools.pairwise(cuts)
    ]


def _grown(sequence: TrainingSequence, factor: int) -> TrainingSequence:
    states = sequence.states
    if states is not None:
        states = dataclasses.replace(states, weight=states.weight * factor)
    return dataclasses.replace(sequence, weight=sequence.weight * factor, states=states)
