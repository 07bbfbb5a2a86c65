"""State of a run between steps, and one step: collect, assign credit, train, publish.

A step makes `algorithm.num_epochs` times `num_minibatches` optimizer updates at most, by default
one.
"""

import asyncio
import contextlib
import ctypes
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
from tqdm.auto import tqdm

from lightning_jax.engine.engine import Engine
from lightning_jax.gateway.routing import Routing
from lightning_jax.loading import load_function
from lightning_jax.models.formats.load import LoadedModel
from lightning_jax.rl.advantages import equal_groups
from lightning_jax.rl.batch import TrainingSequence
from lightning_jax.rl.credit import assign_credit
from lightning_jax.rl.multi_policy.prepare import prepare_policies
from lightning_jax.rollouts.collect import read_trajectories
from lightning_jax.rollouts.failures import FailureWatch
from lightning_jax.rollouts.metrics import (
    TraceReader,
    eval_change,
    eval_metrics,
    eval_metrics_by,
)
from lightning_jax.rollouts.runner import Runner, make_requests, run_requests
from lightning_jax.system.files import write_whole
from lightning_jax.system.threads import run_in_thread
from lightning_jax.traces.store import Store
from lightning_jax.train import multihost
from lightning_jax.train.config import Config
from lightning_jax.train.export import EXPORTED, export
from lightning_jax.train.metrics import MetricsLog, plot_curves
from lightning_jax.train.monitors import (
    DropWatch,
    FiniteWatch,
    PackingWatch,
    serve_metrics,
)
from lightning_jax.train.state import Replica
from lightning_jax.train.tasks import (
    TaskIterator,
    demonstration_sequences,
    evenly_spaced,
    group_tasks,
)
from lightning_jax.types import FINISHED, Metrics, Rollout, Task, Trajectory

log = logging.getLogger(__name__)

DRAW_EVERY_S = 30.0  # drawing takes a second
# Nats. Sampler and trainer share one forward function, so more is a bug. bfloat16 rounds by 1e-3.
MISMATCH_ALARM = {"float32": 1e-3, "bfloat16": 1e-2}


class Run:
    """State of one run between steps, and the operations that change it."""

    def __init__(
        self,
        config: Config,
        model: LoadedModel,
        store: Store,
        train_tasks: Sequence[Task],
        dev_tasks: Sequence[Task],
    ) -> None:
        warmup, directory = config.warmup, Path(config.run_dir)
        self.config, self.model, self.store, self.directory = config, model, store, directory
        self.finite = FiniteWatch(config.weights, config.algorithm.max_nonfinite_steps)
        self.failures = FailureWatch(store)
        self.packing, self.drops = PackingWatch(config.batch), DropWatch(config.batch)
        self.saving: asyncio.Task[float] | None = None  # the checkpoint being written
        self.row_at = time.monotonic()  # when the last row was complete
        self.drawn_at = -math.inf  # when the curves were drawn
        self.tasks = TaskIterator(train_tasks, config.rollout.tasks_per_step, config.seed)
        self.spare_tasks: list[Task] = []  # drawn from `tasks` but not used yet
        groups = group_tasks(train_tasks, warmup.group_by, warmup.group_size)
        self.demonstrations = TaskIterator(groups, warmup.groups_per_step, config.seed + 1)
        self.demonstrate = load_function(warmup.demonstrations) if warmup.demonstrations else None
        self.dev_tasks = evenly_spaced(dev_tasks, config.eval.num_tasks)
        self.replica = Replica(config, model)
        self.leader = multihost.Leader(self.replica)
        if progress := self.replica.progress:
            self.tasks.restore(progress["tasks"])
            # Use the tasks as they are now: a path or a URL in a task may have changed.
            present = {task["id"]: task for task in train_tasks}
            spare: list[Task] = progress.get("spare_tasks", [])
            self.spare_tasks = [present.get(task["id"], task) for task in spare]
            self.demonstrations.restore(progress["demonstrations"])
        self.reader = TraceReader(
            config.roles,
            config.reward_rules,
            model.tokenizer.decode,
            config.policies,
            config.rollout,
        )
        self.metrics = MetricsLog(directory / "metrics.jsonl", self.step)

    @property
    def step(self) -> int:
        """Number of steps that made the current weights."""
        return self.replica.step

    def connect(self, engines: Sequence[Engine], runner: Runner) -> None:
        """Attach the engines, one per weight set in order, and the runner of agents."""
        self.engines, self.runner = engines, runner

    async def one_step(self) -> Metrics:
        """Run one step and return its metrics row.

        A step is an evaluation if one is due, the updates, and the publication of new weights.
        Raises NotFinite if the gradients of too many steps in a row were not finite.
        """
        step, row = self.step, await self.evaluate_if_due()
        served = self.runner.gateway.stats()
        if self.replica.phase == "warmup":
            row |= await self._supervised_step()
        else:
            row |= await self._policy_step()
        row |= serve_metrics(served, self.runner.gateway.stats())
        row |= await run_in_thread(self._publish_next)
        if self.step % self.config.checkpoint.every == 0:
            await self._begin_save()
        # From row to row, so that it includes drawing the curves of the previous row.
        row["time/step_s"] = time.monotonic() - self.row_at
        self.row_at += row["time/step_s"]
        await run_in_thread(self.record, step, row)
        await asyncio.to_thread(_return_freed_memory)
        return row

    async def evaluate_if_due(self) -> Metrics:
        """Return metrics of a greedy evaluation on the dev tasks, or {} if none is due."""
        settings, step = self.config.eval, self.step
        after_warmup = step - self.config.warmup.num_steps
        due = (
            step == self.config.total_steps
            or await self._was_evaluated(step)
            or (
                settings.at_start
                if step == 0 or after_warmup == 0
                else after_warmup > 0 and settings.every > 0 and after_warmup % settings.every == 0
            )
        )
        if not due or not self.dev_tasks:
            return {}
        started = time.monotonic()
        rollouts = await self._collect(self.dev_tasks, "eval", 1)
        results = eval_metrics(rollouts) | eval_metrics_by(settings.by, self.dev_tasks, rollouts)
        since = 0 if after_warmup <= 0 else self.config.warmup.num_steps
        before = await self.store.in_order(self.store.rollouts, phase="eval", step=since)
        # The change made by the warm-up or by the policy phase.
        if since < step and (change := eval_change(before, rollouts)):
            results |= change | {"eval/change_since_step": float(since)}
        return results | {"time/eval_s": time.monotonic() - started}

    async def _was_evaluated(self, step: int) -> bool:
        """Return True if the store has the complete evaluation of this step.

        A run that was made longer or shorter then keeps its results.
        """
        stored = await self.store.in_order(self.store.rollouts, phase="eval", step=step)
        done = {r.task_id for r in stored if r.status in FINISHED and not r.superseded}
        return done.issuperset(str(task["id"]) for task in self.dev_tasks)

    async def _supervised_step(self) -> Metrics:
        assert self.demonstrate is not None, "config checks that a warm-up has demonstrations"
        started = time.monotonic()
        tasks = [task for group in next(self.demonstrations) for task in group]
        conversations = await asyncio.to_thread(self.demonstrate, tasks)
        routing = Routing(self.config.roles, self.config.policies)
        sequences = demonstration_sequences(conversations, self.model.tokenizer, routing)
        prepared = time.monotonic()
        metrics = await self._learn(sequences)
        metrics["time/prepare_s"] = prepared - started
        # The function leaves out tasks without a demonstration.
        metrics |= {
            "train/num_tasks": float(len(tasks)),
            "train/num_conversations": float(len(conversations)),
        }
        return {name.replace("train/", "warmup/"): value for name, value in metrics.items()}

    async def _policy_step(self) -> Metrics:
        started = time.monotonic()
        trajectories, metrics = await self._sample()
        metrics["time/rollout_s"] = time.monotonic() - started
        algorithm, values, of_values = self.config.algorithm, None, {}
        if algorithm.has_critic:  # else sending trajectories to all processes is useless
            values, of_values = await run_in_thread(self.leader.call, "values", trajectories)
        prepared = time.monotonic()
        sequences, of_data = await run_in_thread(
            prepare_policies,
            trajectories,
            algorithm,
            self.config.policies,
            policy_version=self.step,
            values=values,
        )
        metrics |= of_values | of_data
        metrics["time/prepare_s"] = time.monotonic() - prepared
        metrics |= await self._learn(sequences)
        alarm = MISMATCH_ALARM[self.config.model.dtype]
        if metrics.get("train/mismatch_kl", 0.0) > alarm:
            log.warning(
                "train/mismatch_kl is %.2g at step %d, above %g; the rollouts were not sampled "
                "from these weights",
                metrics["train/mismatch_kl"],
                self.step,
                alarm,
            )
        return metrics

    async def _sample(self) -> tuple[list[Trajectory], Metrics]:
        """Return (trajectories of the step's rollouts, metrics of all of them).

        If `max_sampling_rounds` is above 1, groups with equal returns are left out. Other tasks
        replace them while rounds are left (dynamic sampling, DAPO, arXiv 2503.14476). Metrics of
        rewards include the groups left out.
        """
        algorithm, size = self.config.algorithm, self.config.rollout.group_size
        wanted, num_rounds = self.config.rollout.tasks_per_step, 0
        rollouts: list[Rollout] = []
        num_tasks = num_useful = 0
        while True:
            tasks = self._next_tasks(wanted - num_useful)
            rollouts += await self._collect(tasks, "train", size, first_index=num_tasks)
            num_rounds, num_tasks = num_rounds + 1, num_tasks + len(tasks)
            trajectories, metrics = await read_trajectories(
                self.store, rollouts, policy_version=self.step, reader=self.reader
            )
            if algorithm.max_sampling_rounds == 1:
                return trajectories, metrics
            equal = equal_groups(assign_credit(trajectories, algorithm))
            useful = [trajectory for trajectory in trajectories if trajectory.group_id not in equal]
            num_useful = len({trajectory.group_id for trajectory in useful})
            if num_useful == wanted or num_rounds == algorithm.max_sampling_rounds:
                return useful, metrics | {
                    "rollout/num_sampling_rounds": float(num_rounds),
                    "rollout/num_groups_left_out": float(num_tasks - num_useful),
                    "rollout/num_groups_replaced": float(num_tasks - wanted),
                }

    def _next_tasks(self, number: int) -> list[Task]:
        while len(self.spare_tasks) < number:
            self.spare_tasks += next(self.tasks)
        taken, self.spare_tasks = self.spare_tasks[:number], self.spare_tasks[number:]
        return taken

    async def _collect(
        self, tasks: Sequence[Task], phase: str, group_size: int, *, first_index: int = 0
    ) -> list[Rollout]:
        """Run the tasks and return the finished rollouts.

        Task indices start at `first_index`. Raises TooManyFailures or BrokenAgent if the run
        should end.
        """
        requests = [
            replace(request, task_index=first_index + request.task_index)
            for request in make_requests(tasks, phase, self.step, group_size)
        ]
        with tqdm(
            total=len(requests), desc=f"{phase} {self.step}", leave=False, disable=None
        ) as bar:

            def on_done(rollout: Rollout) -> None:
                bar.update()

            rollouts = await run_requests(requests, self.runner, on_done=on_done)
        await run_in_thread(self.failures.observe, rollouts, f"{phase} {self.step}")
        return rollouts

    async def _learn(self, sequences: Sequence[TrainingSequence]) -> Metrics:
        """Call `_update` once the checkpoint being written no longer reads the state."""
        return await self.saved() | await run_in_thread(self._update, sequences)

    def _update(self, sequences: Sequence[TrainingSequence]) -> Metrics:
        """Train on the sequences and return metrics.

        If no sequence has a gradient, the weights stay the same.
        """
        started = time.monotonic()
        metrics = self.leader.call("update", sequences)
        self.finite.observe(metrics, self.step)
        self.packing.observe(metrics, self.step)
        self.drops.observe(metrics, self.step)
        return metrics | {"time/train_s": time.monotonic() - started}

    def _publish_next(self) -> Metrics:
        """Go to the next step, load its weights into the engines, and return timing metrics.

        Weights that the step did not train only get the new version.
        """
        self.leader.call("advance")
        started = time.monotonic()
        self.leader.tell("publish")
        params = {name: self.replica.states[name].params for name in self.replica.changed}
        for engine, name in zip(self.engines, self.config.weights, strict=True):
            engine.publish(params.get(name), self.step)
        seconds = time.monotonic() - started
        self.store.add_version(self.step, self.step)
        number = sum(leaf.size for leaf in jax.tree.leaves(params))
        size = number * jnp.dtype(self.config.model.dtype).itemsize
        return {"time/publish_s": seconds, "serve/publish_gb_per_s": size / seconds / 1e9}

    async def close(self) -> None:
        """Wait for a checkpoint being written, draw the curves and close the state."""
        try:
            await self.saved()
            self.draw()
        finally:
            self.replica.close()

    async def _begin_save(self) -> None:
        """Start writing a checkpoint of this step, unless there is one.

        It is written while the next rollouts run. `saved` waits for it.
        """
        progress = {
            "tasks": self.tasks.state(),
            "spare_tasks": list(self.spare_tasks),
            "demonstrations": self.demonstrations.state(),
        }

        def save() -> float:
            started = time.monotonic()
            self.leader.call("save", progress)
            return time.monotonic() - started

        self.saving = asyncio.create_task(run_in_thread(save))
        if jax.process_count() > 1:  # the leader's commands must not overlap
            await self.saving

    async def saved(self) -> Metrics:
        """Wait for the checkpoint being written, if any. Return its duration and the wait.

        Raises CheckpointError if it could not be written.
        """
        saving, self.saving = self.saving, None
        if saving is None:
            return {}
        started = time.monotonic()
        took = await saving
        waited = time.monotonic() - started
        return {"time/checkpoint_s": took, "time/checkpoint_wait_s": waited}

    async def save(self) -> None:
        """Write a checkpoint of this step, unless there is one."""
        await self.saved()
        await self._begin_save()
        await self.saved()

    def record(self, step: int, row: Metrics) -> None:
        """Add a row to the metrics file, and redraw the curves if they are old."""
        self.metrics.write(step, row)
        if time.monotonic() - self.drawn_at >= DRAW_EVERY_S:
            self.draw()

    def draw(self) -> None:
        """Write the plot of the curves so far."""
        plot_curves(self.metrics.rows, self.directory / "curves.png", str(self.directory))
        self.drawn_at = time.monotonic()

    def export(self) -> Path:
        """Export the policies, see `export.export`, and return their directory."""
        (self.directory / EXPORTED).unlink(missing_ok=True)
        for name in self.config.weights:
            params = self.leader.call("whole_params", name)
            export(self.directory, self.model, name, params, self.config.adapters)
        write_whole(self.directory / EXPORTED, f'{{"step": {self.step}}}\n')
        return self.directory / "policy"


def _return_freed_memory() -> None:
    """Return freed memory to the system; glibc by itself keeps blocks of a few MB.

    A step frees thousands of them, in an order that leaves gigabytes of holes. Do nothing on
    systems without glibc.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
