"""Prefill of the requests that have a slot: copy the cached prefix, compute the rest in parts.

A turn of the loop computes as much as fits in the time that it is given, so a long prompt takes
several turns. Prompts take turns, too. Several that fit are prefilled in one batch. A prefix that
several of them share is computed once, cached, and copied to the others.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from lightning_jax.engine.decode import Request
from lightning_jax.engine.device.prefix_cache import MIN_REUSE, PrefixCache, Row
from lightning_jax.engine.device.programs import DecodeState
from lightning_jax.engine.device.slots import Fill, SlotPrograms
from lightning_jax.engine.scheduler import Admission, Pace, Unfilled
from lightning_jax.engine.score import PromptScorer

_COUNTERS = ("requests", "prefill_tokens", "prefix_hit_tokens")


class Prefill:
    """Prefill of admitted requests, on the engine's thread only.

    The caller holds the decode state.
    """

    def __init__(self, programs: SlotPrograms, prefixes: PrefixCache) -> None:
        self._programs, self._prefixes, self._tree = programs, prefixes, prefixes.tree
        self._scorer = PromptScorer(programs.config, programs.capacities)
        self._pace = Pace(programs.buckets, programs.config.shape.even_context)
        self._admitted: list[Request] = []  # without their cached prefix yet
        self._filling: list[Request] = []  # the one whose turn is next first
        self.counts = dict.fromkeys(_COUNTERS, 0)

    def hold(self, request: Request) -> None:
        """Pin the cached prefix of the prompt while the request waits.

        Otherwise conversations that take turns and do not all fit would evict each other's pages
        just before they are due.
        """
        request.prefix = self._tree.match(request.prompt[:-1], request.adapter).node
        self._tree.pin(request.prefix)

    def add(self, admission: Admission[Request]) -> None:
        """Add a request that now has a slot."""
        admission.request.slot = admission.slot
        self._admitted.append(admission.request)

    def remove(self, request: Request) -> None:
        """Forget a request that ends, and release its `hold`."""
        self._let_go(request)
        for requests in (self._admitted, self._filling):
            if request in requests:
                requests.remove(request)

    def advance(
        self, params: Any, version: int, state: DecodeState, seconds: float
    ) -> tuple[DecodeState, list[Request]]:
        """Fill rows with as much of their prompts as fits in the time, at least one chunk.

        A row gets its prompt except the last token, which the slot decodes next. Returns the new
        state and the requests whose rows are filled. Donates `state`.
        """
        filled: list[Request] = []
        end, is_first = time.monotonic() + seconds, True
        while self._admitted or self._filling:
            state = self._restore(state, version)
            prompts = [_unfilled(request) for request in self._filling]
            parts = self._pace.take(prompts, seconds)
            if not parts and not is_first:
                break
            state = self._fill(params, state, parts or [self._pace.least(prompts[0])])
            filled += self._finish(params)
            seconds, is_first = end - time.monotonic(), False
        return state, filled

    def _restore(self, state: DecodeState, version: int) -> DecodeState:
        """Copy cached prefixes to the rows of new requests. Donates `state`.

        Requests wait while another one computes an uncached prefix of their prompts.
        """
        waiting, starting = [], []
        for request in self._admitted:
            if self._repeats(request):
                waiting.append(request)
            else:
                request.version = version
                starting.append(request)
                self._filling.append(request)
        self._admitted = waiting
        rows = [_row(request, len(request.prompt) - 1) for request in starting]
        state, lengths = self._prefixes.restore(state, rows)
        for request, length in zip(starting, lengths, strict=True):
            self._let_go(request)
            request.num_filled = request.response.num_cached = length
            self.counts["requests"] += 1
            self.counts["prefix_hit_tokens"] += length
        return state

    def _fill(self, params: Any, state: DecodeState, parts: Sequence[Unfilled]) -> DecodeState:
        """Compute parts of the first prompts. Measure them unless all is filled after them.

        Donates `state`.
        """
        requests = self._filling[: len(parts)]
        pairs = list(zip(requests, parts, strict=True))
        fills = []
        for request, part in pairs:
            row = _row(request, part.start + part.number)
            fills.append(Fill(row.slot, part.start, row.ids[part.start :], row.adapter))
        is_last = not self._admitted and parts == [_unfilled(other) for other in self._filling]
        if not is_last:
            jax.block_until_ready(state)  # else the last decode step would be measured, too
        started, waited_s = time.monotonic(), self._programs.waited_s()
        state = replace(state, cache=self._programs.prefill(params, state.cache, fills))
        if not is_last:
            jax.block_until_ready(state)
            waited_s = self._programs.waited_s() - waited_s  # for programs to compile
            self._pace.add(parts, time.monotonic() - started - waited_s)
        for request, part in pairs:
            request.num_filled += part.number
            self.counts["prefill_tokens"] += part.number
        # Cache them now, not at the end of the response: other rollouts of the group come next.
        self._prefixes.keep(state, [_row(request, request.num_filled) for request in requests])
        self._filling = self._filling[len(parts) :] + requests
        return state

    def _finish(self, params: Any) -> list[Request]:
        """Take out and return the requests whose rows are filled."""
        filled = [request for request in self._filling if not _unfilled(request).number]
        self._filling = [request for request in self._filling if _unfilled(request).number]
        for request in filled:
            if request.sampling.score_prompt:
                scores = self._scorer(params, request.prompt, request.adapter)
                request.response.prompt_scores = scores
        return filled

    def _repeats(self, request: Request) -> bool:
        """Return True if a filling row is about to compute an uncached prefix of this prompt."""
        if not self._filling or not self._tree.num_pages:  # most requests start alone
            return False
        prompt, adapter = request.prompt, request.adapter
        head = prompt[: self._tree.match(prompt[:-1], adapter).length + MIN_REUSE]
        if len(head) == len(prompt):  # the uncached rest is too short to wait for
            return False
        return any(
            other.adapter == adapter
            and other.prompt[: len(head)] == head
            and other.num_filled < len(head)  # else the cache has no room for it
            and other.version == self._tree.version  # else it is not cached
            for other in self._filling
        )

    def _let_go(self, request: Request) -> None:
        """Release a `hold`, if there is one."""
        if request.prefix is not None:
            self._tree.unpin(request.prefix)
            request.prefix = None


def _unfilled(request: Request) -> Unfilled:
    return Unfilled(request.num_filled, len(request.prompt) - 1 - request.num_filled)


def _row(request: Request, length: int) -> Row:
    """Return the row of a request with the first tokens of its prompt."""
    assert request.slot is not None, "only a request with a slot has a row"
    return Row(request.slot, request.prompt[:length], request.version, request.adapter)
