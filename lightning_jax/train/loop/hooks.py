"""Hooks of a run that need its train state or are classes of the reader's."""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax

from lightning_jax.errors import UserError
from lightning_jax.rl.batches.microbatches import pair_sizes
from lightning_jax.rl.sequence import TrainingSequence
from lightning_jax.settings import ConfigError
from lightning_jax.settings.loading import load_function
from lightning_jax.system.text import in_one_line
from lightning_jax.train.directory import Status
from lightning_jax.train.hook import Hook, UpdateInput
from lightning_jax.train.memory.lowering import lower_step
from lightning_jax.train.state.replica import Replica
from lightning_jax.types import Metrics, Rollout

log = logging.getLogger(__name__)


class CompileAhead(Hook):
    """Thread that compiles the programs of a replica's next update while rollouts run.

    They are those of the shapes in the settings, so an update compiles nothing. Of an accelerator's
    smaller ones (`pair_sizes`) there are as many as the rollouts leave time for. Do nothing if an
    update spans several processes, reads a critic, a reference or a teacher, or none is left to do.
    The exit of the interpreter waits for the thread, because JAX crashes if a compilation is
    interrupted.
    """

    def __init__(self, replica: Replica, num_updates: int) -> None:
        self._replica = replica
        self._thread = threading.Thread(target=self._compile, name="compile-ahead")
        algorithm = replica.config.algorithm
        reads_more = algorithm.has_critic or algorithm.has_reference
        reads_more |= replica.config.distill.has_teacher
        self._is_over = False
        self._is_useful = num_updates > 0 and not reads_more and jax.process_count() == 1

    def rollout_ended(self, phase: str | None) -> None:
        """Start the thread, once, when the engine has compiled its first programs."""
        if self._is_useful:
            self._is_useful = False
            self._thread.start()

    def before_update(
        self, step: int, update: UpdateInput
    ) -> tuple[Sequence[TrainingSequence], Metrics]:
        """Wait for the thread, because a second compilation would only take the CPU from it.

        It ends with the program that it compiles now.
        """
        self._is_over = True
        if self._thread.ident is not None:
            self._thread.join()
        return update.sequences, {}

    def _compile(self) -> None:
        started, config = time.monotonic(), self._replica.config
        learner = self._replica.learner
        lower = partial(lower_step, learner, config.model.dtype, config.distill)
        try:
            for lowered in lower():
                lowered.compile()
            *smaller, _ = pair_sizes(learner.batch, learner.mesh.devices.flat[0].platform)
            for size in smaller:
                if not self._is_over:
                    gradient, _ = lower(num_pairs=size)
                    gradient.compile()
        except Exception:  # the update compiles its programs itself, and raises the error
            log.debug("the update could not be compiled in advance", exc_info=True)
        log.debug("compiled the update in %.1f s", time.monotonic() - started)


class HookError(UserError, RuntimeError):
    """Failure of a hook that the settings name. It ends the run, whose last step is saved."""


class UserHook(Hook):
    """Hook of a class that the settings name. What it raises or returns wrongly is a HookError.

    Two of its methods are called where an error would only be logged. Such an error is raised when
    the next method is called.
    """

    def __init__(self, reference: str, config: Any) -> None:
        """Make the hook with the settings. Raises ConfigError if it is not a Hook."""
        self._reference = reference
        self._late_error: HookError | None = None
        make = load_function(reference)
        with self._blamed("__init__"):
            self._hook: Hook = make(config)
        if not isinstance(self._hook, Hook):
            raise ConfigError.wrong_type(
                "hooks",
                f"hooks names {reference!r}, which makes a {type(self._hook).__name__}; name a "
                "subclass of Hook in lightning_jax.train.hook.",
            )

    async def before_rollouts(self, step: int) -> Metrics:
        with self._blamed("before_rollouts", step):
            return _as_metrics(await self._hook.before_rollouts(step))

    def begin_phase(self, phase: str, num_rollouts: int = 0) -> None:
        with self._remembered(), self._blamed("begin_phase"):
            self._hook.begin_phase(phase, num_rollouts)

    def rollout_ended(self, phase: str | None) -> None:
        with self._remembered(), self._blamed("rollout_ended"):
            self._hook.rollout_ended(phase)

    def after_rollouts(self, step: int, rollouts: Sequence[Rollout], metrics: Metrics) -> None:
        with self._blamed("after_rollouts", step):
            self._hook.after_rollouts(step, rollouts, dict(metrics))

    def before_update(
        self, step: int, update: UpdateInput
    ) -> tuple[Sequence[TrainingSequence], Metrics]:
        with self._blamed("before_update", step):
            sequences, metrics = self._hook.before_update(step, update)
            sequences = list(sequences)
            for sequence in sequences:
                if not isinstance(sequence, TrainingSequence):
                    raise TypeError(f"a {type(sequence).__name__} is no TrainingSequence")
            return sequences, _as_metrics(metrics)

    def after_update(self, step: int, metrics: Metrics) -> None:
        with self._blamed("after_update", step):
            self._hook.after_update(step, dict(metrics))

    def after_step(self, step: int, row: Metrics) -> None:
        with self._blamed("after_step", step):
            self._hook.after_step(step, dict(row))

    def close(self, status: Status) -> None:
        """Close the hook. Errors are only logged, as the run has ended."""
        errors, self._late_error = [self._late_error], None
        try:
            with self._blamed("close"):
                self._hook.close(status)
        except HookError as error:
            errors.append(error)
        for error in filter(None, errors):
            log.warning("%s", error, extra={"event": "hook_failed", "hook": self._reference})

    @contextmanager
    def _blamed(self, method: str, step: int | None = None) -> Iterator[None]:
        """Raise HookError for what the block raises, or for what was remembered."""
        late, self._late_error = self._late_error, None
        if late is not None:
            raise late
        where = method if step is None else f"{method} of step {step}"
        try:
            yield
        except UserError as error:
            raise HookError(str(error), reason=error.reason, key=error.key) from error
        except Exception as error:  # foreign code
            raise HookError(
                f"the hook {self._reference} raised {type(error).__name__} in {where}: "
                f"{in_one_line(str(error)) or 'no message'}; correct it, then run the same command "
                "again.",
                reason="failed",
                key="hooks",
            ) from error

    @contextmanager
    def _remembered(self) -> Iterator[None]:
        try:
            yield
        except HookError as error:
            self._late_error = error


def _as_metrics(metrics: Any) -> Metrics:
    """Return the metrics of a user's hook, {} for None. Raises ValueError for other values."""
    numbers = {str(name): float(value) for name, value in (metrics or {}).items()}
    for name in numbers:
        if "/" not in name:
            raise ValueError(f"the metric {name!r} has no area; call it such as my/{name}")
    return numbers
