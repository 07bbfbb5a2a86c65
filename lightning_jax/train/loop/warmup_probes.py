"""Probes of a warm-up: sampled attempts that show how much RL could learn from its weights.

A group teaches only if its attempts earn differently, and leads far only if some attempt earns the
full reward. The product of both shares rises while a warm-up teaches the form of an answer, and
falls again when it has made the attempts alike. `warmup.stop` ends it near that peak.
"""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_jax.rollouts.results.metrics import attempt_shares, task_rewards
from lightning_jax.train.config import WarmupConfig, WarmupStopConfig
from lightning_jax.types import Metrics, Rollout, Task


@dataclass(frozen=True)
class Probe:
    """Result of a probe of the weights of `step`."""

    step: int
    unequal_share: float  # tasks whose attempts earned differently
    solved_share: float  # tasks of which an attempt earned the full reward

    @property
    def score(self) -> float:
        return self.unequal_share * self.solved_share


def read_probe(step: int, rollouts: Sequence[Rollout]) -> Probe:
    """Return the result of all tasks' attempts, 0 without a finished one.

    A failed agent earns 0. Attempts that the infrastructure failed do not count.
    """
    return Probe(step, *attempt_shares(list(task_rewards(rollouts).values())))


def best_probe(probes: Sequence[Probe]) -> Probe | None:
    """Return the probe with the highest score, the latest of equal ones, or None without one."""
    return max(reversed(probes), key=lambda probe: probe.score, default=None)


def is_past_peak(probes: Sequence[Probe], stop: WarmupStopConfig) -> bool:
    """Return True if the last `stop.patience` probes score lower than an earlier one.

    That one scores at least `stop.min_score`. Before, the warm-up has not reached what RL could
    use: the first steps make a policy worse that solved a task by luck.
    """
    best = best_probe(probes)
    if best is None or best.score < stop.min_score:
        return False
    return len(probes) - 1 - list(probes).index(best) >= stop.patience


class WarmupProbes:
    """Probes of a run's warm-up so far.

    `run(tasks, "probe", step, attempts)` returns the rollouts of that many sampled attempts at each
    task.
    """

    def __init__(
        self,
        warmup: WarmupConfig,
        tasks: Sequence[Task],
        run: Callable[[Sequence[Task], str, int, int], Coroutine[Any, Any, list[Rollout]]],
    ) -> None:
        self._warmup, self._tasks, self._run = warmup, tasks, run
        self._probes: list[Probe] = []

    async def measure_if_due(self, step: int) -> Metrics:
        """Return the metrics of a probe of this step's weights, or {} if none is due."""
        stop = self._warmup.stop
        if not stop.every or step >= self._warmup.num_steps or step % stop.every:
            return {}
        if any(probe.step == step for probe in self._probes):  # before a stop that a crash undid
            return {}
        probe = read_probe(step, await self._run(self._tasks, "probe", step, stop.attempts))
        self._probes.append(probe)
        return {
            "warmup/probe_unequal_share": probe.unequal_share,
            "warmup/probe_solved_share": probe.solved_share,
            "warmup/probe_score": probe.score,
        }

    @property
    def best(self) -> Probe | None:
        return best_probe(self._probes)

    @property
    def is_newest_best(self) -> bool:
        """True if the newest probe is the best so far and scores enough to end the warm-up."""
        best = self.best
        if best is None or best.score < self._warmup.stop.min_score:
            return False
        return best is self._probes[-1]

    @property
    def is_past_peak(self) -> bool:
        """True if the warm-up should end with the weights of the best probe."""
        return is_past_peak(self._probes, self._warmup.stop)

    def progress(self) -> dict[str, Any]:
        """Return the probes as a JSON object."""
        return {"probes": [asdict(probe) for probe in self._probes]}

    def restore(self, progress: Mapping[str, Any] | None) -> None:
        """Continue after the probes of `progress`."""
        self._probes = [Probe(**fields) for fields in (progress or {}).get("probes", ())]
