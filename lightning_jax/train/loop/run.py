"""One step of a run: collect rollouts, prepare sequences, update, publish the weights, save."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from lightning_jax.engine.grammar.compiler import GrammarCompiler
from lightning_jax.rl.batches.masks import with_masks
from lightning_jax.rl.prepare import prepare_policies
from lightning_jax.rl.sequence import TrainingSequence
from lightning_jax.rl.update.noise_scale import noise_metrics
from lightning_jax.system.files import write_whole
from lightning_jax.system.memory import return_freed_memory
from lightning_jax.system.threads import run_in_thread, run_to_end
from lightning_jax.train.config import Config
from lightning_jax.train.directory import EXPORTED, status_of
from lightning_jax.train.hook import Hook, UpdateInput
from lightning_jax.train.loop.collect import Collector
from lightning_jax.train.loop.serving import ServedWeights
from lightning_jax.train.loop.warmup_probes import WarmupProbes
from lightning_jax.train.state.export import export
from lightning_jax.train.state.multihost import Leader
from lightning_jax.train.state.replica import Replica
from lightning_jax.train.watch.metrics import MetricsLog
from lightning_jax.train.watch.progress import Progress
from lightning_jax.train.watch.report import serve_metrics, summary
from lightning_jax.types import Metrics

log = logging.getLogger(__name__)


class Run:
    """One run between steps, and the operations that change it.

    `leader` changes the train state in all processes. `served` are its weights as the agents of the
    collector's runner get them. `hooks` take part in each step, among them `metrics` and
    `progress`.
    """

    def __init__(
        self,
        config: Config,
        leader: Leader[Replica],
        served: ServedWeights,
        collector: Collector,
        metrics: MetricsLog,
        progress: Progress,
        hooks: Sequence[Hook],
    ) -> None:
        self.config, self.leader, self.replica = config, leader, leader.target
        self.served, self.metrics, self.progress, self.hooks = served, metrics, progress, hooks
        self.collector, self.pipelines = collector, collector.pipelines
        self.gateway, self.store = collector.runner.gateway, collector.runner.store
        collector.hooks = hooks
        collector.groups.restore(self.replica.progress)
        model = self.replica.model
        self.grammars = GrammarCompiler.shared(
            model.tokenizer, model.config.shape.vocab_size, config.serve
        )
        self.probes = WarmupProbes(config.warmup, self.pipelines.probe_tasks, collector.run)
        self.probes.restore(self.replica.progress)
        self._changes = asyncio.Lock()  # held by commands to `leader`, except of `_saving`
        # Positions in the pipelines at this step, or None while its state is changing.
        self._positions: dict[str, Any] | None = self._progress()
        self._saving: asyncio.Task[float] | None = None  # the checkpoint being written
        self._row_at = time.monotonic()  # when the last row was complete
        self._idle = collector.runner.idle
        self._idle_s = self._idle.now_s()  # at that time

    @property
    def step(self) -> int:
        """Number of steps that made the current weights."""
        return self.replica.step

    @property
    def _is_warmup(self) -> bool:
        return self.replica.phase == "warmup"

    async def one_step(self) -> Metrics:
        """Run one step and return its metrics row.

        A step is the rollouts beside an evaluation if one is due, the updates, and the publication
        of new weights. Once the update begins, a cancelled step is finished first. A warm-up step
        after which nothing is gained ends the warm-up instead. Raises NotFinite if the gradients of
        too many steps in a row were not finite.
        """
        served = self.gateway.stats()
        row = await self._before_rollouts() | await self._probe()
        if self._is_warmup and self.probes.is_past_peak:
            metrics = await self.saved()
            return await run_to_end(self._end_warmup(row | metrics, served))
        collect = self._demonstrations if self._is_warmup else self._policy_sequences
        # Beside the rollouts, which get the first slots. Both use the weights of this step.
        evaluating = asyncio.create_task(self.evaluate())
        try:
            update, metrics = await collect()
            row |= await evaluating
        finally:
            evaluating.cancel()
            await asyncio.gather(evaluating, return_exceptions=True)
        metrics |= await self.saved()  # it reads the state that the update replaces
        return await run_to_end(self._finish_step(row, served, update, metrics))

    async def last_evaluation(self) -> None:
        """Evaluate the weights after the last step if that is due, and write a row."""
        if row := await self._before_rollouts() | await self.evaluate():
            await self._after_step(self.step, row)

    async def _before_rollouts(self) -> Metrics:
        metrics: Metrics = {}
        for hook in self.hooks:
            metrics |= await hook.before_rollouts(self.step)
        return metrics

    async def evaluate(self) -> Metrics:
        """Return the metrics of an evaluation of the current weights, or {} if none is due."""
        results = await self.collector.evaluate_if_due(self.step)
        if results:  # now, because the row of metrics waits for the update
            log.info("step %d: %s", self.step, summary(results))
        return results

    async def _demonstrations(self) -> tuple[UpdateInput, Metrics]:
        """Return the demonstrations of the next step."""
        started = time.monotonic()
        sequences, metrics = await asyncio.to_thread(self.pipelines.next_demonstrations)
        return UpdateInput(sequences), metrics | {"time/prepare_s": time.monotonic() - started}

    async def _policy_sequences(self) -> tuple[UpdateInput, Metrics]:
        """Collect rollouts, and prepare what the next step learns from them."""
        started, algorithm = time.monotonic(), self.config.algorithm
        trajectories, metrics = await self.collector.sample(self.step)
        metrics["time/rollout_s"] = time.monotonic() - started
        values = None
        if algorithm.has_critic:  # else sending trajectories everywhere is useless
            async with self._changes:
                values, of_values = await run_in_thread(
                    self.leader.call, Replica.values, trajectories
                )
            metrics |= of_values
        prepared = time.monotonic()
        sequences, of_data = await run_in_thread(
            prepare_policies,
            *(trajectories, algorithm, self.config.policy_table),
            policy_version=self.step,
            values=values,
        )
        sequences, of_masks = await run_in_thread(with_masks, sequences, self.grammars)
        metrics |= of_data | of_masks | {"time/prepare_s": time.monotonic() - prepared}
        return UpdateInput(sequences, trajectories, self.collector.tasks), metrics

    async def _finish_step(
        self, row: Metrics, served: Metrics, update: UpdateInput, metrics: Metrics
    ) -> Metrics:
        """Learn from the sequences, publish the weights, and write and return the metrics row."""
        step, is_warmup = self.step, self._is_warmup
        self.collector.begin_phase(f"update {step}")
        started = time.monotonic()
        for hook in self.hooks:
            sequences, of_hook = await run_in_thread(hook.before_update, step, update)
            update, metrics = replace(update, sequences=sequences), metrics | of_hook
        async with self._changes:
            self._positions = None
            metrics |= await self._learn(update.sequences)
            metrics["time/train_s"] = time.monotonic() - started
            row |= await run_in_thread(self._publish, Replica.advance)
            await run_in_thread(return_freed_memory)  # before the checkpoint's copies
            self._positions = self._progress()
            if self.step % self.config.checkpoint.every == 0:
                await self._begin_save()
        if is_warmup:
            metrics = {name.replace("train/", "warmup/"): v for name, v in metrics.items()}
        else:
            metrics |= noise_metrics([*self.metrics.rows, metrics])
            metrics["time/sampler_wait_s"] = self._idle.now_s() - self._idle_s
        log.info("step %d: %s", step, summary(metrics))
        return await self._write_row(step, row | metrics, served)

    async def _learn(self, sequences: Sequence[TrainingSequence]) -> Metrics:
        """Train on the sequences. If none has a gradient, the weights stay the same."""
        await run_in_thread(return_freed_memory)  # what rollouts and compilation have left
        with self.gateway.pauses.paused() if self.replica.shares_devices else nullcontext():
            metrics = await run_in_thread(self.leader.call, Replica.update, sequences)
        for hook in self.hooks:
            await run_in_thread(hook.after_update, self.step, metrics)
        return metrics

    def _publish(self, go_on: Callable[[Replica], None]) -> Metrics:
        """Go to the next step, load its weights into the engines, and return timing metrics.

        `go_on` is the command that goes there. Weights that the step did not train only get the
        new version.
        """
        self.leader.call(go_on)
        started = time.monotonic()
        self.leader.tell(Replica.publish)
        params = [
            state.params if policy in self.replica.changed else None
            for policy, state in zip(self.replica.policies, self.replica.states, strict=True)
        ]
        with self.replica.dispatching():
            for index, changed in enumerate(params):
                self.served.publish(changed, self.step, index)
        seconds = time.monotonic() - started
        self.store.add_version(self.step, self.step)
        number = sum(leaf.size for leaf in jax.tree.leaves(params))
        size = number * jnp.dtype(self.config.model.dtype).itemsize
        return {"time/publish_s": seconds, "serve/publish_gb_per_s": size / seconds / 1e9}

    async def _write_row(self, step: int, row: Metrics, served: Metrics) -> Metrics:
        """Write and return the row, completed with the server's metrics and the step's time."""
        row |= serve_metrics(served, self.gateway.stats())
        # From row to row, so that it includes drawing the curves of the previous row.
        row["time/step_s"] = time.monotonic() - self._row_at
        self._row_at += row["time/step_s"]
        self._idle_s = self._idle.now_s()
        await self._after_step(step, row)
        return row

    async def _after_step(self, step: int, row: Metrics) -> None:
        for hook in self.hooks:
            await run_in_thread(hook.after_step, step, row)

    async def _probe(self) -> Metrics:
        """Return the metrics of a probe of the warm-up, or {} if none is due."""
        started = time.monotonic()
        metrics = await self.probes.measure_if_due(self.step)
        if not metrics:
            return {}
        if self.probes.is_newest_best:
            async with self._changes:
                await run_to_end(run_in_thread(self.leader.call, Replica.keep_weights))
        log.info(
            "step %d: attempts differ for %.0f%% of the tasks, and %.0f%% were solved by one",
            *(self.step, 100 * metrics["warmup/probe_unequal_share"]),
            100 * metrics["warmup/probe_solved_share"],
        )
        return metrics | {"time/probe_s": time.monotonic() - started}

    async def _end_warmup(self, row: Metrics, served: Metrics) -> Metrics:
        """Go to the first policy step with the weights of the best probe, and save them."""
        step, best = self.step, self.probes.best
        assert best is not None, "a warm-up ends early after a best probe"
        async with self._changes:
            self._positions = None
            row |= await run_in_thread(self._publish, Replica.end_warmup)
            self._positions = self._progress()
            await self._begin_save()  # before those of the best probe are deleted
        log.info(
            "the warm-up ends at step %d with the weights of step %d, whose probe scored %.2f; "
            "steps go on at %d",
            *(step, best.step, best.score, self.step),
            extra={"event": "warmup_stopped", "step": step, "best_step": best.step},
        )
        row["warmup/best_step"] = float(best.step)
        return await self._write_row(step, row, served)

    def _progress(self) -> dict[str, Any]:
        """Return what a checkpoint of this step keeps of the tasks and groups."""
        kept = self.pipelines.progress() | self.collector.groups.progress()
        return kept | (self.probes.progress() if self.config.warmup.stop.every else {})

    async def _begin_save(self) -> None:
        """Start writing a checkpoint of this step, unless there is one.

        It is written while the next rollouts run. `saved` waits for it.
        """
        positions = self._positions
        assert positions is not None, "the state is whole"

        def save() -> float:
            started = time.monotonic()
            self.leader.call(Replica.save, positions)
            return time.monotonic() - started

        self._saving = asyncio.create_task(run_in_thread(save))
        if jax.process_count() > 1:  # the leader's commands must not overlap
            await self._saving

    async def saved(self) -> Metrics:
        """Wait for the checkpoint being written, if any. Return its duration and the wait.

        Raises CheckpointError if it could not be written.
        """
        saving, started = self._saving, time.monotonic()
        if saving is None:
            return {}
        try:
            took = await asyncio.shield(saving)
        finally:
            if saving.done():
                self._saving = None
        if not self._is_warmup:
            await run_in_thread(self.replica.forget_weights)
        return {"time/checkpoint_s": took, "time/checkpoint_wait_s": time.monotonic() - started}

    async def save(self) -> bool:
        """Write a checkpoint of this step, unless there is one. Return True if there is one then.

        During an update, wait for its end. If it failed, write none.
        """
        self.collector.begin_phase("checkpoint")
        async with self._changes:
            await self.saved()  # an update that ended meanwhile may have begun one
            if self._positions is None:
                return False
            await self._begin_save()
            await self.saved()
        return True

    def export(self) -> None:
        """Export the policies. See `export.export`."""
        directory = Path(self.config.run_dir)
        (directory / EXPORTED).unlink(missing_ok=True)
        adapters = self.config.policy_table.adapters
        for policy in self.replica.policies:
            params = self.leader.call(Replica.whole_params, policy)
            export(directory, self.replica.model, policy.name, params, adapters)
        write_whole(directory / EXPORTED, f'{{"step": {self.step}}}\n')

    async def close(self, error: BaseException | None = None) -> None:
        """Wait for a checkpoint being written, and close the hooks, the metrics with them.

        `error` is what ends the run early, if anything does.
        """
        try:
            await self.saved()
        finally:
            for hook in self.hooks:
                await run_in_thread(hook.close, status_of(error))
