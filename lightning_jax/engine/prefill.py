"""Prefill of the requests that get a slot: copy the cached prefix, compute the rest.

Requests admitted in one turn of the loop are prefilled in one batch. A prefix that several of them
share is computed once, cached, and copied to the others.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_jax.engine.decode import Request
from lightning_jax.engine.device.prefix_cache import MIN_REUSE, PrefixCache, Row
from lightning_jax.engine.device.programs import DecodeState
from lightning_jax.engine.device.slots import Fill, SlotPrograms
from lightning_jax.engine.scheduler import Admission
from lightning_jax.engine.score import PromptScorer

_COUNTERS = ("requests", "prefill_tokens", "prefix_hit_tokens")


class Prefill:
    """Prefill of admitted requests, on the engine's thread only.

    The caller holds the decode state.
    """

    def __init__(self, programs: SlotPrograms, prefixes: PrefixCache) -> None:
        self._programs, self._prefixes, self._tree = programs, prefixes, prefixes.tree
        self._scorer = PromptScorer(programs.config, programs.capacities)
        self.counts = dict.fromkeys(_COUNTERS, 0)

    def hold(self, request: Request) -> None:
        """Pin the cached prefix of the prompt while the request waits.

        Otherwise conversations that take turns and do not all fit would evict each other's pages
        just before they are due.
        """
        request.prefix = self._tree.match(request.prompt[:-1], request.adapter).node
        self._tree.pin(request.prefix)

    def let_go(self, request: Request) -> None:
        """Release a `hold`, if there is one."""
        if request.prefix is not None:
            self._tree.unpin(request.prefix)
            request.prefix = None

    def begin(
        self,
        params: Any,
        version: int,
        state: DecodeState,
        admissions: Sequence[Admission[Request]],
    ) -> DecodeState:
        """Fill each slot's row with its prompt except the last token, which the slot decodes next.

        Returns the new state. Donates `state`.
        """
        while admissions:
            now: list[Admission[Request]] = []
            later: list[Admission[Request]] = []
            for admission in admissions:
                (later if self._repeats(admission, now) else now).append(admission)
            rows = [
                Row(one.slot, one.request.prompt[:-1], version, one.request.adapter) for one in now
            ]
            state, lengths = self._prefixes.restore(state, rows)
            for admission in now:
                self.let_go(admission.request)
            fills = [
                Fill(row.slot, length, row.ids[length:], row.adapter)
                for row, length in zip(rows, lengths, strict=True)
            ]
            state = replace(state, cache=self._programs.prefill(params, state.cache, fills))
            # Cache them now, not at the end of the response: other rollouts of the group come next.
            self._prefixes.keep(state, rows)
            for admission, fill in zip(now, fills, strict=True):
                self._start(params, version, admission)
                admission.request.response.num_cached = fill.start
                self.counts["requests"] += 1
                self.counts["prefill_tokens"] += len(fill.ids)
                self.counts["prefix_hit_tokens"] += fill.start
            admissions = later
        return state

    def _repeats(self, admission: Admission[Request], others: Sequence[Admission[Request]]) -> bool:
        """Return True if another request is computing an uncached prefix of this prompt."""
        if not others or not self._tree.num_pages:  # skip the lookup: most requests start alone
            return False
        prompt, adapter = admission.request.prompt, admission.request.adapter
        head = prompt[: self._tree.match(prompt[:-1], adapter).length + MIN_REUSE]
        if len(head) == len(prompt):  # the uncached rest is too short to wait for
            return False
        requests = [other.request for other in others]
        return any(o.adapter == adapter and o.prompt[: len(head)] == head for o in requests)

    def _start(self, params: Any, version: int, admission: Admission[Request]) -> None:
        request = admission.request
        if request.sampling.score_prompt:
            scores = self._scorer(params, request.prompt, request.adapter)
            request.response.prompt_scores = scores
        request.slot, request.version = admission.slot, version
