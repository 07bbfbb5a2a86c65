"""Decode steps of the requests that run: started on the device, and read when it has made them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from lightning_jax.serve.adjust import LogitAdjuster
from lightning_jax.serve.engine import Engine
from lightning_jax.serve.generation import Generation
from lightning_jax.serve.programs import DecodeState
from lightning_jax.serve.radix import Node
from lightning_jax.serve.response import Response, SampledToken
from lightning_jax.serve.sampling import Adjustment, Sampled
from lightning_jax.types import SamplingParams, TopLogprobs

_COUNTERS = ("steps", "adjusted_steps", "tokens_generated", "tokens_past_end")


@dataclass(eq=False)  # one is another only if it is the same request
class Request:
    """A request as the engine's thread knows it."""

    generation: Generation
    prompt: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    response: Response
    adjuster: LogitAdjuster | None  # None: drawn from the policy's own logits
    adapter: int | None = None  # of several, which one answers
    tenant: str | None = None  # whose it is; see Scheduler
    held: Node | None = None  # what is cached of the prompt, while it waits
    slot: int | None = None  # None: waiting
    version: int = -1  # of the weights that it began with
    num_due: int = 0  # steps it needs yet, if nothing ends it before its limit
    finished: bool = False
    is_unread: bool = False  # its last token was sampled, and its next one depends on it

    @property
    def is_sequential(self) -> bool:
        """Whether its next step needs the token of the last one."""
        return self.adjuster is not None and self.adjuster.depends_on_tokens

    @property
    def is_ready(self) -> bool:
        """Whether it can take part in the next step."""
        waits = self.adjuster is not None and not self.adjuster.is_ready
        return self.num_due > 0 and not self.is_unread and not waits


@dataclass(frozen=True)
class Steps:
    """Decode steps that the device was told to make in one go, and for whom."""

    requests: Mapping[int, Request]  # by slot
    sampled: Sampled  # on the device; where there are several steps, with one axis more in front
    version: int  # of the weights
    number: int

    @property
    def is_done(self) -> bool:
        """Whether the device has made them."""
        return self.sampled.tokens.is_ready()


class Stepper:
    """Starts steps and reads them. The state of the slots is the caller's."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._positions = np.zeros(engine.num_slots, np.int64)  # of the token decoded next
        self.counts = dict.fromkeys(_COUNTERS, 0)

    def begin(self, request: Request, position: int) -> None:
        """The request has a slot now, and its next token goes to `position`."""
        request.num_due = request.response.limit
        self._positions[request.slot] = position

    def start(
        self, params: Any, state: DecodeState, version: int, running: Mapping[int, Request]
    ) -> tuple[DecodeState, Steps | None]:
        """Start a step for every running request that is ready; None if there is none.

        The others are held: their slots stay as they are, and what they sample later is the same.
        Several steps are started at once where the engine has a program for it, if no request
        reaches its limit before and none is sequential. A request that ends before is given the
        rest for nothing. Donates `state`.
        """
        requests = {slot: request for slot, request in running.items() if request.is_ready}
        if not requests:
            return state, None
        slots = np.fromiter(requests, np.int64, len(requests))
        adjustment = self._adjustment(requests)
        number = min(request.num_due for request in requests.values())
        is_single = adjustment is not None or any(r.is_sequential for r in running.values())
        most = self._engine.steps_per_dispatch
        number = 1 if is_single or number < most else most
        longest = int(self._positions[slots].max()) + number
        state, sampled = self._engine.generate(
            params, state, longest, adjustment, slots=list(requests), steps=number
        )
        self._positions[slots] += number
        for request in requests.values():
            request.num_due -= number
            request.is_unread = request.is_sequential
        self.counts["steps"] += number
        self.counts["adjusted_steps"] += adjustment is not None
        return state, Steps(requests, sampled, version, number)

    def read(self, steps: Steps) -> Iterator[tuple[Request, SampledToken]]:
        """The tokens in the order they were sampled; none for a request that is finished, which
        it may be by what was read before. Waits for the device.
        """
        if all(request.finished for request in steps.requests.values()):
            self.counts["tokens_past_end"] += steps.number * len(steps.requests)
            return
        sampled = jax.device_get(steps.sampled)  # the only transfer
        if steps.number == 1:
            sampled = jax.tree.map(lambda leaf: leaf[None], sampled)
        tokens, behavior = sampled.tokens.tolist(), sampled.behavior_logprobs.tolist()
        sampling, tempered = sampled.sampling_logprobs.tolist(), sampled.tempered_logprobs.tolist()
        for step in range(steps.number):
            for slot, request in steps.requests.items():
                if request.finished:
                    self.counts["tokens_past_end"] += 1
                    continue
                self.counts["tokens_generated"] += 1
                request.is_unread = False
                yield (
                    request,
                    SampledToken(
                        tokens[step][slot],
                        behavior[step][slot],
                        sampling[step][slot],
                        tempered[step][slot],
                        steps.version,
                        forced=request.adjuster is not None and request.adjuster.forced,
                        top_logprobs=_top(sampled, step, slot, request.sampling.top_logprobs),
                    ),
                )

    def _adjustment(self, requests: Mapping[int, Request]) -> Adjustment | None:
        """Return the changes to the slots' logits, new every step; None if there is none."""
        adjusters = {slot: r.adjuster for slot, r in requests.items() if r.adjuster}
        biases = {slot: adjuster for slot, adjuster in adjusters.items() if adjuster.has_bias}
        masks = {slot: adjuster.matcher for slot, adjuster in adjusters.items() if adjuster.matcher}
        has_likeliest = any(request.sampling.top_logprobs for request in requests.values())
        if not (biases or masks or has_likeliest):
            return None
        adjustment = self._engine.adjustment(bool(biases), has_likeliest)
        for slot, adjuster in biases.items():
            adjuster.add_to(adjustment.bias[slot])
        for slot, matcher in masks.items():
            adjustment.allowed[slot] = matcher.packed()
        return adjustment


def _top(sampled: Sampled, step: int, slot: int, number: int) -> TopLogprobs:
    if number == 0:
        return ()
    best = sampled.likeliest
    assert best is not None, "a request that asks for them makes the step give them"
    ids, logprobs = best.ids[step, slot, :number], best.logprobs[step, slot, :number]
    return tuple(zip(ids.tolist(), logprobs.tolist(), strict=True))
