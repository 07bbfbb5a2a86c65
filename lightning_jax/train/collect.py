"""Rollouts of a step's tasks, and the trajectories made from them."""

import time
from collections.abc import Callable, Sequence

from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.rl.advantages import without_equal_groups
from lightning_jax.rollouts.collect import read_trajectories
from lightning_jax.rollouts.results.failures import FailureWatch
from lightning_jax.rollouts.runner import (
    Runner,
    check_infrastructure,
    make_requests,
    run_requests,
)
from lightning_jax.system.threads import run_in_thread
from lightning_jax.traces.trajectories import TraceReader
from lightning_jax.train.config import Config
from lightning_jax.train.external_groups import ExternalGroups
from lightning_jax.train.gaming import GamingWatch
from lightning_jax.train.groups import Groups
from lightning_jax.train.pipelines import Pipelines
from lightning_jax.train.progress import Progress
from lightning_jax.train.unused import UnusedWatch
from lightning_jax.types import Metrics, Rollout, Task, Trajectory


class Collector:
    """Source of each step's rollouts."""

    def __init__(
        self,
        config: Config,
        pipelines: Pipelines,
        runner: Runner,
        tokenizer: Tokenizer,
        progress: Progress,
        on_rollout: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_rollout` is called after each rollout."""
        self._config, self._pipelines, self._runner = config, pipelines, runner
        self._progress, self._on_rollout = progress, on_rollout
        self._sampling: str | None = None  # phase that waits for groups
        self.tasks: dict[str, Task] = {}  # of the last step's groups, by the group's id
        self._failures = FailureWatch(runner.store, config.rollout.max_agent_failures)
        self._reader = TraceReader(
            *(config.roles, config.reward_rules, tokenizer.decode, config.policies, config.rollout),
            max_staleness=config.algorithm.max_staleness,
        )
        self.groups = (
            ExternalGroups(config, runner, self._reader, pipelines.tasks_by_id, self._count)
            if config.agent.external
            else Groups(config, pipelines, runner, self._count)
        )
        self._unused = UnusedWatch(self._reader, runner.store)
        self._gaming = GamingWatch(config.rewards)

    async def sample(self, step: int) -> tuple[list[Trajectory], Metrics]:
        """Return (trajectories of the step's rollouts, metrics of all of them).

        If `max_sampling_rounds` is above 1, groups with equal returns are left out. Other tasks
        replace them while rounds are left (dynamic sampling, DAPO, arXiv 2503.14476). Metrics of
        rewards include the groups left out.
        """
        algorithm, config = self._config.algorithm, self._config.rollout
        wanted, num_rounds, waited_s = config.tasks_per_step, 0, 0.0
        store, rollouts = self._runner.store, list[Rollout]()
        num_tasks = num_useful = 0
        self.tasks = {}
        while True:
            started = time.monotonic()
            round_rollouts = await self._round(step, wanted - num_useful)
            waited_s += time.monotonic() - started
            rollouts += round_rollouts
            num_rounds, num_tasks = num_rounds + 1, num_tasks + wanted - num_useful
            trajectories, metrics = await read_trajectories(
                store, rollouts, policy_version=step, reader=self._reader
            )
            await run_in_thread(self._unused.observe, metrics, rollouts, step)
            self._gaming.observe(metrics, rollouts, step)
            metrics |= {"time/trainer_wait_s": waited_s}
            if algorithm.max_sampling_rounds == 1:
                return trajectories, metrics | self._of_all_rounds(rollouts)
            useful = without_equal_groups(trajectories, algorithm)
            num_useful = len({trajectory.group_id for trajectory in useful})
            if num_useful == wanted or num_rounds == algorithm.max_sampling_rounds:
                return useful, metrics | self._of_all_rounds(rollouts) | {
                    "rollout/num_sampling_rounds": float(num_rounds),
                    "rollout/num_groups_left_out": float(num_tasks - num_useful),
                    "rollout/num_groups_replaced": float(num_tasks - wanted),
                }

    def _of_all_rounds(self, rollouts: Sequence[Rollout]) -> Metrics:
        """Return what was counted since the last step, and the state of the task order."""
        metrics = self.groups.take_metrics() | self._pipelines.observe(rollouts)
        scorer = self._runner.scorer
        return metrics | (scorer.take_metrics() if scorer is not None else {})

    async def _round(self, step: int, number: int) -> list[Rollout]:
        """Return the rollouts of groups that the step takes, in order.

        Raises TooManyFailures or BrokenAgent if the run should end.
        """
        self._sampling = f"train {step}"
        total = number * self._config.rollout.group_size
        self._progress.begin(self._sampling, total)
        for _ in range(min(self.groups.num_finished, total)):
            self._progress.advance(self._sampling)
        try:
            groups = await self.groups.take(step, number)
        finally:
            name, self._sampling = self._sampling, None
        self.tasks |= {group.group_id: group.task for group in groups}
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        check_infrastructure(rollouts, self._config.rollout)
        await run_in_thread(self._failures.observe, rollouts, name)
        return rollouts

    def _count(self) -> None:
        """Count a finished rollout of a group, which may belong to a later step."""
        if self._sampling is not None:
            self._progress.advance(self._sampling)
        self._on_rollout()

    async def run(
        self, tasks: Sequence[Task], phase: str, step: int, attempts: int = 1
    ) -> list[Rollout]:
        """Run each task `attempts` times and return the finished rollouts, task by task.

        Raises TooManyFailures or BrokenAgent if the run should end.
        """
        requests = make_requests(tasks, phase, step, attempts)
        name = f"{phase} {step}"
        self._progress.begin(name, len(requests))

        def count(rollout: Rollout) -> None:
            self._progress.advance(name)
            self._on_rollout()

        rollouts = await run_requests(requests, self._runner, on_done=count)
        await run_in_thread(self._failures.observe, rollouts, name)
        return rollouts
