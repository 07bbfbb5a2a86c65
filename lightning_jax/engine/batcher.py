"""Continuous batching: give requests slots, decode a step of all, and hand out the tokens."""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from lightning_jax.engine.decode import Request, Stepper, Steps
from lightning_jax.engine.device.prefix_cache import PrefixCache, Row
from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.engine.generation import ChunkDelivery, EngineError, news_of
from lightning_jax.engine.grammar.compiler import GrammarCompiler, GrammarError
from lightning_jax.engine.grammar.process import GrammarProcessLost, wait_readable
from lightning_jax.engine.prefill import Prefill
from lightning_jax.engine.scheduler import Scheduler
from lightning_jax.engine.types import LONGEST_WAIT
from lightning_jax.types import FinishReason

log = logging.getLogger(__name__)

ALONE = 8  # factor of the time for prefill while nothing decodes
MASK_TIMEOUT_S = 0.02  # longest wait for masks if all requests are sequential

_COUNTERS = ("cancelled", "grammar_errors", "tokens_forced")


class Batcher:
    """Requests of one engine, its slots and its weights, on the engine's thread only."""

    def __init__(
        self,
        programs: SlotPrograms,
        params: Any,
        version: int,
        grammars: GrammarCompiler,
        eos_ids: Collection[int],
        prefill_s: float,
    ) -> None:
        self._programs, self._grammars, self._prefill_s = programs, grammars, prefill_s
        self._params, self._version = params, version
        self._state = programs.init_state()
        self._prefixes = PrefixCache(programs, version)
        self._prompts = Prefill(programs, self._prefixes)
        self._scheduler: Scheduler[Request] = Scheduler(programs.num_slots)
        self._stepper = Stepper(programs, eos_ids)
        self._ahead: Steps | None = None  # started, but its tokens are not handed out yet
        self._retiring: list[Request] = []
        self._outgoing: list[ChunkDelivery] = []
        self._counts = dict.fromkeys(_COUNTERS, 0)
        self._longest_wait_s = 0.0

    @property
    def is_busy(self) -> bool:
        """True if a turn has work to do without new requests."""
        return bool(self._scheduler.running or self._retiring or self._ahead)

    def compile_first(self, num_requests: int) -> None:
        """Begin to compile, in a thread, what the first requests need. Call before `turn`."""
        self._programs.compile_first(self._params, self._state, num_requests)

    def warmup(self) -> None:
        """Compile all programs. Call before `turn`."""
        self._programs.warmup(self._params, self._state)
        self._state = self._prefixes.warmup(self._state)

    def load_weights(self, params: Any | None, version: int) -> None:
        """Use these weights from the next dispatch on. None: the same ones under a new version."""
        self._version = self._prefixes.tree.version = version
        if params is not None:
            self._params = params
            self._prefixes.tree.reset(version)

    def turn(
        self, submitted: Sequence[Request], cancelled: Sequence[Request | None]
    ) -> list[ChunkDelivery]:
        """Take in requests, decode one step, and return the results."""
        started = time.monotonic()
        for request in submitted:
            self._scheduler.enqueue(request, request.tenant, request.call)
        for request in cancelled:
            self._finish(request, "cancelled")
        self._retire()
        for request in submitted:
            if not request.finished:
                self._prompts.hold(request)
        self._begin()
        if self._decode_once():
            self._stepper.count_time(time.monotonic() - started)
        deliveries, self._outgoing = self._outgoing, []
        return deliveries

    def stats(self) -> dict[str, float]:
        """Return counters since the start and the number of running requests, on any thread."""
        counted = self._counts | self._prompts.counts | self._stepper.counts
        counts = {f"serve/{name}": float(count) for name, count in counted.items()}
        return counts | {
            "serve/running": float(len(self._scheduler.running)),
            LONGEST_WAIT: self._longest_wait_s,
            "serve/compiles": float(self._programs.compiles),
            "serve/compiling": float(self._programs.num_compiling()),
            "serve/prefix_cache_pages_used": float(self._prefixes.tree.num_used),
            "serve/prefix_cache_evicted_pages": float(self._prefixes.tree.num_evicted),
        }

    def _begin(self) -> None:
        """Assign free slots to waiting requests, and prefill their prompts.

        Long prompts are spread over several turns, so that running requests keep decoding in
        between.
        """
        while admission := self._scheduler.admit():
            self._prompts.add(admission)
        running = self._scheduler.running.values()
        is_decoding = self._ahead is not None or any(request.num_due for request in running)
        seconds = self._prefill_s if is_decoding else ALONE * self._prefill_s
        self._state, filled = self._prompts.advance(
            self._params, self._version, self._state, seconds
        )
        for request in filled:
            self._stepper.begin(request)
            if adjuster := request.adjuster:
                self._try(request, lambda begin=adjuster.begin: begin(self._grammars))

    def _decode_once(self) -> bool:
        """Start one or more steps, then hand out the tokens of the previous ones, which are ready.

        Return False if there were none.

        So the device never waits for the host. It leaves out a request that has just ended by
        itself. One that a stop string or its client has ended takes part in vain. A sequential
        request, such as one with a grammar, needs its last token first. It is held for a step while
        others run ahead. If all are sequential, each step's tokens are handed out first, and one
        step serves all.
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
        return bool(before or self._ahead)

    def _take_masks(self, is_over: Callable[[], bool]) -> None:
        """Take the masks of requests that may join the next step, until `is_over` returns True."""
        while True:
            late = []
            for request in list(self._scheduler.running.values()):
                adjuster = request.adjuster
                if adjuster and not request.is_unread:
                    self._try(request, adjuster.poll)
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
        if steps is None:
            return
        for requests, are_last in self._stepper.read(steps):
            stalled_s, clock, now_s = self._programs.waited_s(), None, 0.0
            read_s = time.monotonic() - stalled_s
            for request, is_last in zip(requests, are_last, strict=True):
                if request.token_s is not None and read_s - request.token_s > self._longest_wait_s:
                    self._longest_wait_s = read_s - request.token_s
                request.token_s = read_s
                is_late = False
                if limit := request.response.time_limit:
                    if limit.now_s != clock:  # most requests share one
                        clock = limit.now_s
                        now_s = clock() - stalled_s
                    is_late = limit.is_over(now_s)
                if is_last or is_late or request.is_watched:
                    self._look_at(request, is_late)

    def _look_at(self, request: Request, is_late: bool) -> None:
        """Look at the newest token of a request: it may end it, or somebody may listen to it."""
        adjuster, reason = request.adjuster, request.response.end(is_late)
        self._counts["tokens_forced"] += adjuster is not None and adjuster.forced
        if reason:
            self._finish(request, reason)
            return
        if news := news_of(request.generation, request.response):
            self._outgoing.append(news)
        request.has_begun = True
        if adjuster:
            token_id = request.response.last_id
            self._try(request, lambda: adjuster.push(token_id))

    def _try(self, request: Request, work: Callable[[], None]) -> None:
        """Run grammar work for one request. An error ends only that request."""
        try:
            work()
        except (GrammarError, GrammarProcessLost, OSError) as error:
            number = len(request.response)
            log.warning("a grammar failed after %d tokens: %s", number, error)
            self._finish(request, "error", None if isinstance(error, GrammarError) else str(error))

    def _finish(
        self, request: Request | None, reason: FinishReason, failure: str | None = None
    ) -> None:
        """End a waiting or running request. Do nothing if it has already ended.

        With a `failure` of the machine, which the grammar has not caused, it has no completion.
        """
        if request is None or request.finished:
            return
        request.finished = True
        is_cut = request.response.is_late or request.response.stop != ""
        request.runs_on = is_cut or reason in ("cancelled", "error")
        self._prompts.remove(request)
        if request.slot is None:
            self._scheduler.remove(request)
        else:
            self._scheduler.release(request.slot)
            self._retiring.append(request)
        if request.adjuster:
            request.adjuster.end()
        self._counts["cancelled"] += reason == "cancelled"
        self._counts["grammar_errors"] += reason == "error"
        outcome = request.response.completion(reason) if failure is None else EngineError(failure)
        self._outgoing.append(ChunkDelivery(request.generation, None, outcome))

    def _retire(self) -> None:
        """Cache the keys and values of ended requests.

        This happens one turn late, so that no response waits for it.
        """
        requests, self._retiring = self._retiring, []
        rows = []
        for request in requests:
            assert request.slot is not None, "only a request with a slot retires"
            # The last token was sampled but never fed, so the row does not hold it.
            tokens = request.response.token_ids
            ids = [*request.prompt, *tokens][: request.num_filled + len(tokens)]
            rows.append(Row(request.slot, ids, request.version, request.adapter))
        self._prefixes.keep(self._state, rows)
