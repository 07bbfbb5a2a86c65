"""Continuous batching: one thread admits, decodes and swaps weights behind an asyncio interface.

All JAX work happens on that thread. Other threads post to one inbox under one lock. Results return
to the event loops in one batch per step.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_jax.engine.admission import SlotLoop
from lightning_jax.engine.cache.prefix_cache import PrefixCache
from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.decode import Request, Stepper, Steps
from lightning_jax.engine.generation import Delivery, EngineError, Generation, deliver
from lightning_jax.engine.grammar import GrammarCompiler, GrammarError
from lightning_jax.engine.grammar_process import GrammarLimits, GrammarProcessLost, wait_readable
from lightning_jax.engine.logits import LogitAdjuster, moves_logits
from lightning_jax.engine.prefill import Prompts
from lightning_jax.engine.response import SampledToken
from lightning_jax.engine.scheduler import Admission, Scheduler
from lightning_jax.engine.slots import SlotPrograms
from lightning_jax.engine.types import SamplingParams
from lightning_jax.errors import InvalidValue
from lightning_jax.models.lora import frozen_part, overlay
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.types import FinishReason

log = logging.getLogger(__name__)

PROMPT_TOKENS = 4096  # per turn, for requests that start; the last one may exceed it
MASK_TIMEOUT_S = 0.02  # longest wait for masks if all requests are sequential


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
    step. Params from `SlotPrograms.spread` are shared instead. For a model with adapters,
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
        super().__init__(programs, params, tokenizer, serve)
        limits = GrammarLimits(
            serve.grammar_timeout_s, serve.grammar_memory_mib, serve.max_grammar_kib
        )
        self._grammars = GrammarCompiler.shared(tokenizer, programs.config.vocab_size, limits)
        self._version = self._published = version
        self._base = frozen_part(self._params)  # None: each update replaces all weights
        self._state = programs.init_state()
        self._prefixes = PrefixCache(programs, version)
        self._prompts = Prompts(programs, self._prefixes)
        self._scheduler: Scheduler[Request] = Scheduler(programs.num_slots)
        self._stepper = Stepper(programs)
        self._ahead: Steps | None = None  # started, but its tokens are not handed out yet
        self._retiring: list[Request] = []
        self._outgoing: list[Delivery] = []
        self._counts = dict.fromkeys(_COUNTERS, 0)
        # Shared between threads, under the lock:
        self._changed = threading.Condition()
        self._inbox = _Inbox()
        self._thread: threading.Thread | None = None

    # Public methods, for any thread.

    @property
    def version(self) -> int:
        """Weights version that will answer the next request."""
        return self._published

    def warmup(self) -> None:
        """Compile all programs. Call before `start`."""
        if self._thread is not None:
            raise EngineError(
                "the engine loop is already running; call warmup() before start()", reason="running"
            )
        self._state = self._prefixes.warmup(self._programs.warmup(self._params, self._state))

    def start(self) -> None:
        """Start the engine's thread."""
        if self._thread is not None:
            raise EngineError(
                "the engine loop was already started; create a new one", reason="running"
            )
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
    ) -> Generation:
        """Queue a request. Call it on an event loop's thread.

        `adapter` selects one of a model's several adapters, and is None for other models. `tenant`
        is the owner of the request: tenants share the slots fairly.

        Raises PromptTooLong, QueueFull, Draining, EngineError after a failure, and ValueError for
        an empty prompt or a bias on an unknown token. If a grammar does not compile, the response
        ends as "error". Call `prepare` first to catch that.
        """
        prompt = tuple(prompt_ids)
        response = self._respond(prompt, sampling)
        self._check_adapter(adapter)
        adjuster = self._adjuster(sampling)
        generation = Generation(self._cancel)
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        request = Request(generation, prompt, sampling, seed, response, adjuster, adapter, tenant)
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
                raise InvalidValue(
                    f"weights version is {version}; must be greater than the last one, "
                    f"{self._published}",
                    reason="out_of_range",
                    key="version",
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

    def stats(self) -> dict[str, float]:
        """Return counters since the start and the numbers of running and waiting requests."""
        running = len(self._scheduler.running)
        counted = self._counts | self._prompts.counts | self._stepper.counts
        counts = {f"serve/{name}": float(count) for name, count in counted.items()}
        return counts | {
            "serve/running": float(running),
            "serve/queue_depth": float(max(len(self._intake) - running, 0)),
            "serve/compiles": float(self._programs.compiles),
            "serve/prefix_cache_pages_used": float(self._prefixes.pages_used),
            "serve/prefix_cache_evicted_pages": float(self._prefixes.evicted_pages),
        }

    def _check_adapter(self, adapter: int | None) -> None:
        number = self._programs.config.num_adapters
        if (adapter is None) != (number is None) or not 0 <= (adapter or 0) < (number or 1):
            raise InvalidValue(
                f"adapter is {adapter}; the model has {number or 0} adapters",
                reason="unknown",
                key="adapter",
            )

    def _adjuster(self, sampling: SamplingParams) -> LogitAdjuster | None:
        if not moves_logits(sampling):
            return None
        return LogitAdjuster(sampling, self._programs.config.vocab_size)

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
            self._changed.wait_for(
                lambda: (
                    self._inbox
                    or self._intake.failure
                    or self._scheduler.running
                    or self._retiring
                    or self._ahead
                )
            )
            if self._intake.failure:
                return False
            inbox, self._inbox = self._inbox, _Inbox()
        if inbox.version is not None:
            self._version = inbox.version
            self._prefixes.keep_all(self._version)
        if inbox.weights is not None:
            self._params = inbox.weights
            self._prefixes.forget_all(self._version)
        for request in inbox.submitted:
            self._scheduler.enqueue(request, request.tenant)
        for generation in inbox.cancelled:
            self._finish(self._intake.get(generation), "cancelled")
        self._retire()
        for request in inbox.submitted:
            if not request.finished:
                self._prompts.hold(request)
        self._begin()
        self._step()
        self._send()
        return True

    def _begin(self) -> None:
        """Assign free slots to waiting requests.

        Long prompts are spread over several turns, so that running requests keep decoding in
        between.
        """
        admissions: list[Admission[Request]] = []
        num_tokens = 0
        while num_tokens < PROMPT_TOKENS and (admission := self._scheduler.admit()):
            admissions.append(admission)
            num_tokens += len(admission.request.prompt)
        self._state = self._prompts.begin(self._params, self._version, self._state, admissions)
        for admission in admissions:
            self._stepper.begin(admission.request, len(admission.request.prompt) - 1)
            adjuster = admission.request.adjuster
            if adjuster:
                self._try(admission.request, lambda begin=adjuster.begin: begin(self._grammars))

    def _step(self) -> None:
        """Start one or more steps, then hand out the tokens of the previous ones, which are ready.

        So the device never waits for the host. A request that has just ended runs once more in
        vain. A sequential request, such as one with a grammar, needs its last token first. It is
        held for a step while others run ahead. If all are sequential, each step's tokens are handed
        out first, and one step serves all.
        """
        running = self._scheduler.running
        before, self._ahead = self._ahead, None
        if any(request.num_due and not request.is_sequential for request in running.values()):
            self._take_masks(lambda: before is None or before.is_done)
            self._ahead = self._dispatch()
        else:
            self._hand_out(before)
            end = time.monotonic() + MASK_TIMEOUT_S
            self._take_masks(lambda: time.monotonic() >= end)
            before = self._dispatch()
        self._hand_out(before)

    def _take_masks(self, is_over: Callable[[], bool]) -> None:
        """Take the masks of requests that may join the next step, until `is_over` returns True."""
        while True:
            late = []
            for request in list(self._scheduler.running.values()):
                adjuster = request.adjuster
                if adjuster and not request.is_unread:
                    self._try(request, adjuster.look)
                    if adjuster.matcher and not adjuster.is_ready:
                        late.append(adjuster.matcher.fileno())
            if not late or is_over():
                return
            wait_readable(late, 0.001)

    def _dispatch(self) -> Steps | None:
        self._state, steps = self._stepper.start(
            self._params, self._state, self._version, self._scheduler.running
        )
        return steps

    def _hand_out(self, steps: Steps | None) -> None:
        """Give each request that is still running its sampled tokens."""
        if steps is not None:
            for request, token in self._stepper.read(steps):
                self._push(request, token)

    def _push(self, request: Request, token: SampledToken) -> None:
        chunk, reason = request.response.push(token)
        self._outgoing.append(Delivery(request.generation, chunk, None))
        self._counts["tokens_forced"] += token.forced
        if reason:
            self._finish(request, reason)
        elif request.adjuster:
            self._try(request, lambda push=request.adjuster.push: push(token.token_id))

    def _try(self, request: Request, work: Callable[[], None]) -> None:
        """Run grammar work for one request. An error ends only that request."""
        try:
            work()
        except (GrammarError, GrammarProcessLost, OSError) as error:
            number = len(request.response.tokens)
            log.warning("a grammar failed after %d tokens: %s", number, error)
            self._finish(request, "error")

    def _finish(self, request: Request | None, reason: FinishReason) -> None:
        """End a waiting or running request. Do nothing if it has already ended."""
        if request is None or request.finished:
            return
        request.finished = True
        if request.slot is None:
            self._scheduler.remove(request)
            self._prompts.let_go(request)
        else:
            self._scheduler.release(request.slot)
            self._retiring.append(request)
        if request.adjuster:
            request.adjuster.end()
        self._counts["cancelled"] += reason == "cancelled"
        self._counts["grammar_errors"] += reason == "error"
        completion = request.response.completion(reason)
        self._outgoing.append(Delivery(request.generation, None, completion))

    def _retire(self) -> None:
        """Cache the keys and values of ended requests, and stop their slots.

        This happens one turn late, so that no response waits for it.
        """
        ended, self._retiring = self._retiring, []
        slots = [request.slot for request in ended if request.slot is not None]
        for slot, request in zip(slots, ended, strict=True):
            # The last token was sampled but never fed, so the row does not hold it.
            ids = [*request.prompt, *(token.token_id for token in request.response.tokens)][:-1]
            self._prefixes.keep(self._state, slot, ids, request.version, request.adapter)
        if slots:
            self._state = self._programs.retire(self._state, slots)

    def _send(self) -> None:
        deliveries, self._outgoing = self._outgoing, []
        deliver(deliveries)
        self._intake.remove(item.generation for item in deliveries if item.outcome is not None)


_COUNTERS = ("cancelled", "grammar_errors", "tokens_forced")
