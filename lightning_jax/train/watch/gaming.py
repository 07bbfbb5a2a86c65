"""Warning about a reward that rises while a held-out component falls."""

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from lightning_jax.rollouts.config import RewardConfig
from lightning_jax.rollouts.results.audit import most_overrated
from lightning_jax.types import Metrics, Rollout

log = logging.getLogger(__name__)

WINDOW = 4  # steps at the start, and newest steps, that are compared
NUM_ERRORS = 2.0  # standard errors that a change must exceed


class GamingWatch:
    """One-time warning for each held-out component that falls while the reward rises."""

    def __init__(self, rewards: Mapping[str, RewardConfig]) -> None:
        self._held_out = [name for name, reward in rewards.items() if not reward.weight]
        self._means: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._known: set[str] = set()

    def observe(self, metrics: Metrics, rollouts: Sequence[Rollout], step: int) -> None:
        """Read a step's means. `rollouts` are those to name."""
        for name in self._held_out:
            held_out = metrics.get(f"reward/{name}_mean")
            if held_out is None or "rollout/reward_mean" not in metrics:
                continue
            means = self._means[name]
            means.append((metrics["rollout/reward_mean"], held_out))
            rise, fall = (change([pair[i] for pair in means]) for i in (0, 1))
            if name in self._known or rise <= NUM_ERRORS or fall >= -NUM_ERRORS:
                continue
            self._known.add(name)
            named = [rollout.rollout_id for rollout in most_overrated(rollouts, name)]
            log.warning(
                "step %d: the reward has risen and the held-out reward %s has fallen since the "
                "first %d steps, so the reward may be gamed; look at %s (docs/howto/"
                "rewards_from_judges.md)",
                *(step, name, WINDOW, ", ".join(named) or "the rollouts"),
                extra={"event": "gamed_reward", "component": name, "named": named, "step": step},
            )


def change(values: Sequence[float]) -> float:
    """Return the change from the first to the newest WINDOW steps, in standard errors.

    0 if there are fewer than twice as many steps. The error is that of the two means.
    """
    if len(values) < 2 * WINDOW:
        return 0.0
    first, last = np.asarray(values[:WINDOW]), np.asarray(values[-WINDOW:])
    difference = float(last.mean() - first.mean())
    error = float(np.sqrt((first.var(ddof=1) + last.var(ddof=1)) / WINDOW))
    return difference / max(error, 1e-9)
