"""Calls that show what the attempts at one task earned their rewards for. Pure functions."""

from collections.abc import Mapping

from lightning_jax.studio.records import CallView, RolloutView

MAX_CALLS = 6  # last ones of an attempt that are compared


def earning_calls(attempts: Mapping[str, RolloutView]) -> dict[str, list[CallView]]:
    """Return the calls to show of each attempt, in order.

    These are the last call of each agent and role, and calls with a reward of their own. If they
    read the same in attempts with different rewards, such as a verdict at the end, add as many
    earlier calls as it takes until they differ.
    """
    chosen = {name: _last_calls(view, 1) for name, view in attempts.items()}
    if not _is_ambiguous(chosen, attempts):
        return chosen
    for number in range(2, MAX_CALLS + 1):
        longer = {name: _last_calls(view, number) for name, view in attempts.items()}
        if not _is_ambiguous(longer, attempts):
            return longer
    return chosen


def _last_calls(view: RolloutView, number: int) -> list[CallView]:
    """Return the last calls, the last one of each agent and role, and those with a reward."""
    calls = sorted(view.calls, key=lambda call: call.number)
    shown = {(call.agent, call.role, call.answered_by): call.number for call in calls}
    numbers = {*shown.values(), *(call.number for call in calls[-number:])}
    return [call for call in calls if call.number in numbers or call.reward]


def _is_ambiguous(
    chosen: Mapping[str, list[CallView]], attempts: Mapping[str, RolloutView]
) -> bool:
    """Return whether the same texts earned different rewards."""
    rewards: dict[tuple[str, ...], set[float | None]] = {}
    for name, calls in chosen.items():
        texts = tuple(call.response for call in calls)
        rewards.setdefault(texts, set()).add(attempts[name].rollout.reward)
    return any(len(found) > 1 for found in rewards.values())
