"""Rollouts of a step's tasks, and the trajectories made from them."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_jax.loading import load_function
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
from lightning_jax.settings import ConfigError
from lightning_jax.system.threads import run_in_thread
from lightning_jax.traces.trajectories import TraceReader
from lightning_jax.train.config import Config
from lightning_jax.train.directory import STORE
from lightning_jax.train.external_groups import ExternalGroups
from lightning_jax.train.gaming import GamingWatch
from lightning_jax.train.groups import Groups
from lightning_jax.train.pipelines import Pipelines
from lightning_jax.train.progress import Progress
from lightning_jax.train.step_groups import Source
from lightning_jax.train.stored import StoredGroups
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
        self.groups = self._make_source()
        self._unused = UnusedWatch(self._reader, self.groups.store)
        self._gaming = GamingWatch(config.rewards)

    def _make_source(self) -> Source:
        config, steps, make = self._config, self._pipelines.stored_steps, Groups
        if steps is not None:
            return StoredGroups(Path(config.learn.run or "") / STORE, steps)
        if config.rollout.source is not None:
            make = load_function(config.rollout.source)
        elif config.agent.external:
            tasks = self._pipelines.tasks_by_id
            return ExternalGroups(config, self._runner, self._reader, tasks, self._count)
        source = make(config, self._pipelines, self._runner, self._count)
        if not isinstance(source, Source):
            raise ConfigError(
                f"rollout.source {config.rollout.source!r} makes a {type(source).__name__}; name a "
                "subclass of lightning_jax.train.groups.Groups, or of step_groups.Source.",
                reason="wrong_type",
                key="rollout.source",
            )
        return source

    async def sample(self, step: int) -> tuple[list[Trajectory], Metrics]:
        """Return (trajectories of the step's rollouts, metrics of all of them).

        If `max_sampling_rounds` is above 1, groups with equal returns are left out. Other tasks
        replace them while rounds are left (dynamic sampling, DAPO, arXiv 2503.14476), but none
        replaces a stored group. Metrics of rewards include the groups left out.
        """
        algorithm, config = self._config.algorithm, self._config.rollout
        wanted, num_rounds, waited_s = config.tasks_per_step, 0, 0.0
        rollouts, num_useful = list[Rollout](), 0
        is_stored = self._pipelines.stored_steps is not None
        max_rounds = 1 if is_stored else algorithm.max_sampling_rounds
        self.tasks = {}
        while True:
            started = time.monotonic()
            round_rollouts = await self._round(step, wanted - num_useful)
            waited_s += time.monotonic() - started
            rollouts += round_rollouts
            num_rounds, num_tasks = num_rounds + 1, len({r.group_id for r in rollouts})
            trajectories, metrics = await read_trajectories(
                self.groups.store, rollouts, policy_version=step, reader=self._reader
            )
            if is_stored:  # the versions are those of another run
                metrics = {k: v for k, v in metrics.items() if "/staleness_" not in k}
            await run_in_thread(self._unused.observe, metrics, rollouts, step)
            self._gaming.observe(metrics, rollouts, step)
            metrics |= {"time/trainer_wait_s": waited_s}
            if algorithm.max_sampling_rounds == 1:
                return trajectories, metrics | self._of_all_rounds(rollouts)
            useful = without_equal_groups(trajectories, algorithm)
            num_useful = len({trajectory.group_id for trajectory in useful})
            if num_useful == wanted or num_rounds == max_rounds:
                return useful, metrics | self._of_all_rounds(rollouts) | {
                    "rollout/num_sampling_rounds": float(num_rounds),
                    "rollout/num_groups_left_out": float(num_tasks - num_useful),
                    "rollout/num_groups_replaced": float(max(num_tasks - wanted, 0)),
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
        if self._pipelines.stored_steps is None:  # else the run that sampled them has looked
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
