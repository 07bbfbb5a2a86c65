"""Rollouts of a step's tasks, and the trajectories made from them."""

import time
from collections.abc import Sequence
from pathlib import Path

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
from lightning_jax.traces.trajectories import TraceReader
from lightning_jax.train.config import Config
from lightning_jax.train.directory import STORE
from lightning_jax.train.hook import Hook
from lightning_jax.train.loop.external_groups import ExternalGroups
from lightning_jax.train.loop.groups import Groups
from lightning_jax.train.tasks.pipelines import Pipelines
from lightning_jax.train.tasks.source import Source
from lightning_jax.train.tasks.stored import StoredGroups
from lightning_jax.types import FINISHED, Metrics, Rollout, Task, Trajectory


class Collector:
    """Source of each step's rollouts. It tells the `hooks` when phases begin and rollouts end."""

    def __init__(self, config: Config, pipelines: Pipelines, runner: Runner) -> None:
        self.config, self.pipelines, self.runner = config, pipelines, runner
        self.hooks: Sequence[Hook] = ()  # some are made from what is here
        self.tasks: dict[str, Task] = {}  # of the last step's groups, by the group's id
        self.reader = TraceReader(
            config.roles,
            config.reward_rules,
            runner.gateway.engine.tokenizer.decode,
            config.policy_table,
            config.rollout,
            max_staleness=config.algorithm.max_staleness,
        )
        self._sampling: str | None = None  # phase that waits for groups
        self._failures = FailureWatch(runner.store, config.rollout.max_agent_failures)
        self.groups = self._make_source()

    def _make_source(self) -> Source:
        config, steps, make = self.config, self.pipelines.stored_steps, Groups
        if steps is not None:
            return StoredGroups(Path(config.learn.run or "") / STORE, steps)
        if config.rollout.source is not None:
            make = load_function(config.rollout.source)
        elif config.agent.external:
            tasks = self.pipelines.tasks_by_id
            return ExternalGroups(config, self.runner, self.reader, tasks, self._count)
        source = make(config, self.pipelines, self.runner, self._count)
        if not isinstance(source, Source):
            raise ConfigError.wrong_type(
                "rollout.source",
                f"rollout.source {config.rollout.source!r} makes a {type(source).__name__}; name a "
                "subclass of Groups in lightning_jax.train.loop.groups, or of Source in "
                "lightning_jax.train.tasks.source.",
            )
        return source

    async def sample(self, step: int) -> tuple[list[Trajectory], Metrics]:
        """Return (trajectories of the step's rollouts, metrics of all of them).

        If `max_sampling_rounds` is above 1, groups with equal returns are left out. Other tasks
        replace them while rounds are left (dynamic sampling, DAPO, arXiv 2503.14476), but none
        replaces a stored group. Metrics of rewards include the groups left out.
        """
        algorithm, config = self.config.algorithm, self.config.rollout
        num_groups, num_rounds, waited_s = config.tasks_per_step, 0, 0.0
        rollouts, num_useful = list[Rollout](), 0
        is_stored = self.pipelines.stored_steps is not None
        max_rounds = 1 if is_stored else algorithm.max_sampling_rounds
        self.tasks = {}
        while True:
            started = time.monotonic()
            round_rollouts = await self._round(step, num_groups - num_useful)
            waited_s += time.monotonic() - started
            rollouts += round_rollouts
            num_rounds, num_tasks = num_rounds + 1, len({r.group_id for r in rollouts})
            trajectories, metrics = await read_trajectories(
                self.groups.store, rollouts, policy_version=step, reader=self.reader
            )
            if is_stored:  # the versions are those of another run
                metrics = {k: v for k, v in metrics.items() if "/staleness_" not in k}
            for hook in self.hooks:
                await run_in_thread(hook.after_rollouts, step, rollouts, metrics)
            metrics |= {"time/trainer_wait_s": waited_s}
            if algorithm.max_sampling_rounds == 1:
                return trajectories, metrics | self._of_all_rounds(rollouts)
            useful = without_equal_groups(trajectories, algorithm)
            num_useful = len({trajectory.group_id for trajectory in useful})
            if num_useful == num_groups or num_rounds == max_rounds:
                return useful, metrics | self._of_all_rounds(rollouts) | {
                    "rollout/num_sampling_rounds": float(num_rounds),
                    "rollout/num_groups_left_out": float(num_tasks - num_useful),
                    "rollout/num_groups_replaced": float(max(num_tasks - num_groups, 0)),
                }

    def _of_all_rounds(self, rollouts: Sequence[Rollout]) -> Metrics:
        """Return what was counted since the last step, and the state of the task order."""
        metrics = self.groups.take_metrics() | self.pipelines.observe(rollouts)
        scorer = self.runner.scorer
        return metrics | (scorer.take_metrics() if scorer is not None else {})

    async def _round(self, step: int, number: int) -> list[Rollout]:
        """Return the rollouts of groups that the step takes, in order.

        Raises TooManyFailures or BrokenAgent if the run should end.
        """
        self._sampling = f"train {step}"
        total = number * self.config.rollout.group_size
        self.begin_phase(self._sampling, total)
        for _ in range(min(self.groups.num_finished, total)):
            self._rollout_ended(self._sampling)
        try:
            groups = await self.groups.take(step, number)
        finally:
            name, self._sampling = self._sampling, None
        self.tasks |= {group.group_id: group.task for group in groups}
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        if self.pipelines.stored_steps is None:  # else the run that sampled them has looked
            check_infrastructure(rollouts, self.config.rollout)
            await run_in_thread(self._failures.observe, rollouts, name)
        return rollouts

    def _count(self) -> None:
        """Count a finished rollout of a group, which may belong to a later step."""
        self._rollout_ended(self._sampling)

    def begin_phase(self, phase: str, num_rollouts: int = 0) -> None:
        """Tell all hooks that a phase with this many rollouts begins."""
        for hook in self.hooks:
            hook.begin_phase(phase, num_rollouts)

    def _rollout_ended(self, phase: str | None) -> None:
        for hook in self.hooks:
            hook.rollout_ended(phase)

    async def run(
        self, tasks: Sequence[Task], phase: str, step: int, attempts: int = 1
    ) -> list[Rollout]:
        """Run each task `attempts` times and return the finished rollouts, task by task.

        Raises TooManyFailures or BrokenAgent if the run should end.
        """
        requests = make_requests(tasks, phase, step, attempts)
        name = f"{phase} {step}"
        self.begin_phase(name, len(requests))
        rollouts = await run_requests(
            requests, self.runner, on_done=lambda _: self._rollout_ended(name)
        )
        await run_in_thread(self._failures.observe, rollouts, name)
        return rollouts

    async def evaluate_if_due(self, step: int) -> Metrics:
        """Return metrics of the evaluation before `step`, or {} if none is due.

        A step that the store has evaluated completely is due, so that a run that was made longer or
        shorter keeps its results.
        """
        config, store, tasks = self.config, self.runner.store, self.pipelines.dev_tasks
        after_warmup = step - config.warmup.num_steps
        if step == 0 or after_warmup == 0:
            is_named = config.eval.at_start
        else:
            every = config.eval.every
            is_named = after_warmup > 0 and every > 0 and after_warmup % every == 0
        is_named |= step == config.total_steps
        earlier = await store.in_order(store.rollouts, phase="eval", step=step)
        done = {r.task_id for r in earlier if r.status in FINISHED and not r.superseded}
        if not tasks or not (is_named or done.issuperset(str(task["id"]) for task in tasks)):
            return {}
        started = time.monotonic()
        rollouts = await self.run(tasks, "eval", step)
        results = eval_metrics(rollouts) | eval_metrics_by(config.eval.by, tasks, rollouts)
        since = 0 if after_warmup <= 0 else config.warmup.num_steps
        before = await store.in_order(store.rollouts, phase="eval", step=since)
        # The change made by the warm-up or by the policy phase.
        if since < step and (change := eval_change(before, rollouts)):
            results |= change | {"eval/change_since_step": float(since)}
        if config.eval.attempts:
            sampled = await self.run(tasks, "sampled", step, config.eval.attempts)
            results |= sampled_metrics(sampled)
            if since < step:
                before = await store.in_order(store.rollouts, phase="sampled", step=since)
                results |= eval_change(before, sampled, "eval/sampled_")
        return results | self.pipelines.baselines | {"time/eval_s": time.monotonic() - started}
