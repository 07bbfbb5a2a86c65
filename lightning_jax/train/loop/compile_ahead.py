"""Compilation of the first update while the rollouts before it run."""

import logging
import threading
import time

import jax

from lightning_jax.train.memory.lowering import lower_step
from lightning_jax.train.state.replica import Replica

log = logging.getLogger(__name__)


class CompileAhead:
    """Thread that compiles the programs of a replica's next update.

    They are those of the shapes in the settings, so an update compiles nothing. Do nothing if an
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
        self._is_useful = num_updates > 0 and not reads_more and jax.process_count() == 1

    def start(self) -> None:
        """Start the thread, once. Call this when the engine has compiled its first programs."""
        if self._is_useful:
            self._is_useful = False
            self._thread.start()

    def wait(self) -> None:
        """Wait for the thread, because a second compilation would only take the CPU from it."""
        if self._thread.ident is not None:
            self._thread.join()

    def _compile(self) -> None:
        started = time.monotonic()
        try:
            for lowered in lower_step(self._replica.learner, self._replica.config):
                lowered.compile()
        except Exception:  # the update compiles its programs itself, and raises the error
            log.debug("the update could not be compiled in advance", exc_info=True)
        log.debug("compiled the update in %.1f s", time.monotonic() - started)
