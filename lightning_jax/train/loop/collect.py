"""Rollouts of a step's tasks, and the trajectories made from them."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.rl.advantages import without_equal_groups
from lightning_jax.rollouts.collect import read_trajectories
from lightning_jax.rollouts.results.failures import FailureWatch
from lightning_jax.rollouts.results.metrics import (
    eval_change,
    eval_metrics,
    eval_metrics_by,
    sampled_metrics,
)
from lightning_jax.rollouts.runner import (
    Runner,
    check_infrastructure,
    make_requests,
    run_requests,
)
from lightning_jax.settings import ConfigError
from lightning_jax.settings.loading import load_function
from lightning_jax.system.threads import run_in_thread
from lightning_jax.traces.store import Store
from lightning_jax.traces.trajectories import TraceReader
from lightning_jax.train.config import Config
from lightning_jax.train.directory import STORE
from lightning_jax.train.loop.external_groups import ExternalGroups
from lightning_jax.train.loop.groups import Groups
from lightning_jax.train.tasks.pipelines import Pipelines
from lightning_jax.train.tasks.source import Source
from lightning_jax.train.tasks.stored import StoredGroups
from lightning_jax.train.watch.gaming import GamingWatch
from lightning_jax.train.watch.progress import Progress
from lightning_jax.train.watch.unused import UnusedWatch
from lightning_jax.types import FINISHED, Metrics, Rollout, Task, Trajectory


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
            *(
                config.roles,
                config.reward_rules,
                tokenizer.decode,
                config.policy_table,
                config.rollout,
            ),
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
                "subclass of Groups in lightning_jax.train.loop.groups, or of Source in "
                "lightning_jax.train.tasks.source.",
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


async def evaluate_if_due(
    config: Config, collector: Collector, store: Store, tasks: Sequence[Task], step: int
) -> Metrics:
    """Return metrics of the evaluation before `step`, or {} if none is due.

    A step that the store has evaluated completely is due, so that a run that was made longer or
    shorter keeps its results.
    """
    settings, after_warmup = config.eval, step - config.warmup.num_steps
    if step == 0 or after_warmup == 0:
        is_named = settings.at_start
    else:
        is_named = after_warmup > 0 and settings.every > 0 and after_warmup % settings.every == 0
    is_named |= step == config.total_steps
    if not tasks or not (is_named or await _was_evaluated(store, tasks, step)):
        return {}
    started = time.monotonic()
    rollouts = await collector.run(tasks, "eval", step)
    results = eval_metrics(rollouts) | eval_metrics_by(settings.by, tasks, rollouts)
    since = 0 if after_warmup <= 0 else config.warmup.num_steps
    before = await store.in_order(store.rollouts, phase="eval", step=since)
    # The change made by the warm-up or by the policy phase.
    if since < step and (change := eval_change(before, rollouts)):
        results |= change | {"eval/change_since_step": float(since)}
    if settings.attempts:
        sampled = await collector.run(tasks, "sampled", step, settings.attempts)
        results |= sampled_metrics(sampled)
        if since < step:
            before = await store.in_order(store.rollouts, phase="sampled", step=since)
            results |= eval_change(before, sampled, "eval/sampled_")
    return results | {"time/eval_s": time.monotonic() - started}


async def _was_evaluated(store: Store, tasks: Sequence[Task], step: int) -> bool:
    stored = await store.in_order(store.rollouts, phase="eval", step=step)
    done = {r.task_id for r in stored if r.status in FINISHED and not r.superseded}
    return done.issuperset(str(task["id"]) for task in tasks)
