"""Asyncio interface of the engine's thread, which admits, decodes and swaps weights in turns.

All JAX work happens on that thread, in `Batcher`. Other threads post to one inbox under one lock.
Results return to the event loops in one batch per step.
"""

import logging
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_jax.engine.admission import SlotLoop
from lightning_jax.engine.batcher import Batcher
from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.decode import Request
from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.engine.generation import EngineError, Generation, deliver
from lightning_jax.engine.grammar.compiler import GrammarCompiler
from lightning_jax.engine.logits import LogitAdjuster, moves_logits
from lightning_jax.engine.response import TimeLimit
from lightning_jax.engine.types import SamplingParams
from lightning_jax.errors import InvalidValue
from lightning_jax.models.lora import frozen_part, overlay
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.system.threads import DeviceTurns

log = logging.getLogger(__name__)

IDLE_S = 0.5  # without work, before a program is compiled that may be needed again


@dataclass
class _Inbox:
    """Work posted by other threads. Emptied at the start of every turn."""

    submitted: list[Request] = field(default_factory=list)
    cancelled: list[Generation] = field(default_factory=list)
    weights: Any = None  # None: unchanged
    version: int | None = None  # new weights version, None: unchanged

    def __bool__(self) -> bool:
        return bool(self.submitted or self.cancelled or self.version is not None)


class EngineLoop(SlotLoop[Request]):
    """One replica of an engine: `start` it, `submit` from an event loop, then `close` it.

    Copies `params`, here and in `load_weights`, so the caller may donate them to the next train
    step. Params from `SlotPrograms.prepare_copy` are shared instead. For a model with adapters,
    `load_weights` takes only the adapters.
    """

    def __init__(
        self,
        programs: SlotPrograms,
        params: Any,
        version: int,
        tokenizer: Tokenizer,
        serve: ServeConfig,
    ) -> None:
        super().__init__(programs, tokenizer, serve)
        self._grammars = GrammarCompiler.shared(tokenizer, programs.config.shape.vocab_size, serve)
        served = programs.put_on_mesh(params)
        self._base = frozen_part(served)  # None: each update replaces all weights
        self._batcher = Batcher(
            programs, served, version, self._grammars, tokenizer.eos_ids, serve.prefill_s
        )
        self._published = version
        # Shared between threads, under the lock:
        self._changed = threading.Condition()
        self._inbox = _Inbox()
        self._thread: threading.Thread | None = None
        self.dispatching = DeviceTurns()  # held while a program starts on the devices

    # Public methods, for any thread.

    @property
    def version(self) -> int:
        """Weights version that will answer the next request."""
        return self._published

    def warmup(self) -> None:
        """Compile all programs, so that no request waits for one. Call before `start`."""
        if self._thread is not None:
            raise EngineError(
                "the engine loop is already running; call warmup() before start()", reason="running"
            )
        self._batcher.warmup()

    def start(self, num_requests: int = 1) -> None:
        """Start the engine's thread, and begin to compile what the first requests need.

        `num_requests` of them arrive together.
        """
        if self._thread is not None:
            raise EngineError(
                "the engine loop was already started; create a new one", reason="running"
            )
        self._batcher.compile_first(num_requests)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def prepare(self, grammar: str, owner: str = "") -> None:
        """Compile a grammar in a separate process, before `submit` uses it.

        Each `owner`, such as a rollout, has one new grammar tried at a time. Raises GrammarError if
        the grammar does not compile or exceeds a limit.
        """
        await self._grammars.prepare(grammar, owner)

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        adapter: int | None = None,
        tenant: str | None = None,
        time_limit: TimeLimit | None = None,
        call: str | None = None,
    ) -> Generation:
        """Queue a request. Call it on an event loop's thread.

        `adapter` selects one of a model's several adapters, and is None for other models. `tenant`
        is the owner of the request, and `call` names the requests that were made together: tenants
        share the slots fairly, and so do the calls of each. A `time_limit` belongs to one request.

        Raises PromptTooLong, QueueFull, Draining, EngineError after a failure, and ValueError for
        an empty prompt or a bias on an unknown token. If a grammar does not compile, the response
        ends as "error". Call `prepare` first to catch that.
        """
        prompt = tuple(prompt_ids)
        response = self._respond(prompt, sampling, time_limit)
        self._check_adapter(adapter)
        vocab_size = self._programs.config.shape.vocab_size
        adjuster = LogitAdjuster(sampling, vocab_size) if moves_logits(sampling) else None
        generation = Generation(self._cancel)
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        request = Request(
            generation, prompt, sampling, seed, response, adjuster, adapter, tenant, call
        )
        with self._changed:
            self._intake.add(generation, request, tenant)
            self._inbox.submitted.append(request)
            self._changed.notify()
        return generation

    def load_weights(self, params: Any | None, version: int) -> None:
        """Use these weights for new requests, and for running ones from their next token on.

        With `params=None` the weights stay the same under a new version, and the prefix cache stays
        valid. Raises ValueError unless `version` is above the last one, and EngineError after a
        failure.
        """
        served = None if params is None else overlay(self._base, self._programs.put_on_mesh(params))
        with self._changed:
            if version <= self._published:
                raise InvalidValue.out_of_range(
                    "version",
                    f"weights version is {version}; must be greater than the last one, "
                    f"{self._published}",
                )
            self._intake.check_failure()
            self._published = self._inbox.version = version
            if served is not None:
                self._inbox.weights = served
            self._changed.notify()

    def close(self) -> None:
        """Stop the thread. Unfinished requests fail with EngineError."""
        self._fail(
            EngineError("the engine was closed before the response was complete", reason="closed")
        )
        if self._thread is not None:
            self._thread.join()
        self._programs.compiler.close()

    def stats(self) -> dict[str, float]:
        """Return counters since the start and the numbers of running and waiting requests."""
        stats = self._batcher.stats()
        num_waiting = max(len(self._intake) - stats["serve/running"], 0.0)
        return stats | {"serve/queue_depth": num_waiting}

    def _check_adapter(self, adapter: int | None) -> None:
        number = self._programs.config.execution.num_adapters
        if (adapter is None) != (number is None) or not 0 <= (adapter or 0) < (number or 1):
            raise InvalidValue.unknown(
                "adapter", f"adapter is {adapter}; the model has {number or 0} adapters"
            )

    def _cancel(self, generation: Generation) -> None:
        with self._changed:
            if self._intake.get(generation):
                self._inbox.cancelled.append(generation)
                self._changed.notify()

    def _fail(self, error: EngineError) -> None:
        with self._changed:
            self._intake.fail(error)
            self._changed.notify()

    # Private methods, for the engine's thread only.

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:
            log.exception("the engine's thread failed")
            self._fail(
                EngineError(
                    f"the engine failed: {error!r}. See the log, then start a new engine.",
                    reason="failed",
                )
            )

    def _turn(self) -> bool:
        """Process the inbox, decode one step, and send the results. Return False when closed."""
        with self._changed:
            while not self._changed.wait_for(
                lambda: self._inbox or self._intake.failure or self._batcher.is_busy, IDLE_S
            ):
                self._programs.compile_while_idle()
            if self._intake.failure:
                return False
            inbox, self._inbox = self._inbox, _Inbox()
        if inbox.version is not None:
            self._batcher.load_weights(inbox.weights, inbox.version)
        cancelled = [self._intake.get(generation) for generation in inbox.cancelled]
        with self.dispatching:
            deliveries = self._batcher.turn(inbox.submitted, cancelled)
        deliver(deliveries)
        self._intake.remove(item.generation for item in deliveries if item.outcome is not None)
        return True
