"""Decode steps of the running requests: start them on the device, then read the sampled tokens."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from lightning_jax.engine.device.programs import DecodeState
from lightning_jax.engine.device.radix import Node
from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.engine.device.table import SlotTable, unpack_sampled
from lightning_jax.engine.generation import Generation
from lightning_jax.engine.logits import LogitAdjuster
from lightning_jax.engine.response import Response, SampledToken
from lightning_jax.engine.sampling import Adjustment, Sampled
from lightning_jax.engine.types import SamplingParams, TopLogprobs
from lightning_jax.models.config import MeshConfig
from lightning_jax.models.memory import decode_bytes
from lightning_jax.models.mesh import make_mesh
from lightning_jax.system.accelerators import find_accelerator

_COUNTERS = ("steps", "adjusted_steps", "tokens_generated", "tokens_past_end")
# Seconds of turns that decode, and of them those that reading memory takes at least. Counted on
# accelerators of known bandwidth.
_TIMES = ("decode_s", "decode_bound_s")


@dataclass(eq=False)  # compare by identity
class Request:
    """Request as seen by the engine's thread."""

    generation: Generation
    prompt: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    response: Response
    adjuster: LogitAdjuster | None  # None: sample from the policy's own logits
    adapter: int | None = None  # index, for a model with several adapters
    tenant: str | None = None  # see Scheduler
    call: str | None = None
    prefix: Node | None = None  # cached prefix of the prompt, pinned while waiting
    slot: int | None = None  # None: waiting
    version: int = -1  # weights version at its start
    num_filled: int = 0  # tokens of the prompt that its row holds
    token_s: float | None = None  # time of its latest token, without waits for compiling
    num_due: int = 0  # steps left until its limit
    finished: bool = False
    is_unread: bool = False  # its next token depends on a sampled token not read yet

    @property
    def is_sequential(self) -> bool:
        """True if its next step needs the token of the last one."""
        return self.adjuster is not None and self.adjuster.depends_on_tokens

    @property
    def is_ready(self) -> bool:
        """True if it can take part in the next step."""
        waits = self.adjuster is not None and not self.adjuster.is_ready
        return self.num_due > 0 and not self.is_unread and not waits


@dataclass(frozen=True)
class Steps:
    """Decode steps started on the device in one dispatch, and their requests."""

    requests: Mapping[int, Request]  # by slot
    sampled: Any  # on the device, see `SlotPrograms.generate`
    version: int  # of the weights
    number: int

    @property
    def is_done(self) -> bool:
        """True if the device has finished them."""
        return self.sampled.is_ready()


@dataclass(frozen=True)
class ReadBound:
    """Least time of a decode step: that in which a device reads what the step needs."""

    step_s: float  # to read the weights
    token_s: float  # to read the keys and values of one token

    @classmethod
    def of(cls, programs: SlotPrograms) -> "ReadBound | None":
        """Return the bound of a model's programs, or None if the devices' bandwidth is unknown."""
        devices = sorted(programs.devices, key=lambda device: device.id)
        accelerator = find_accelerator(devices[0].device_kind)
        if accelerator is None:
            return None
        mesh = programs.mesh or make_mesh(MeshConfig(fsdp=1), devices)
        numbers = decode_bytes(programs.config, mesh, programs.dtype)
        return cls(*(number / accelerator.bandwidth for number in numbers))

    def seconds(self, contexts: Int[np.ndarray, " R"], steps: int) -> float:
        """Return the bound of some steps of rows that begin with contexts of these lengths."""
        longer = len(contexts) * steps * (steps - 1) // 2  # each step adds a token to each row
        return steps * self.step_s + (steps * int(contexts.sum()) + longer) * self.token_s


class Stepper:
    """Runner that starts decode steps and reads their tokens. The caller holds the decode state."""

    def __init__(self, programs: SlotPrograms) -> None:
        self._programs = programs
        self._table = SlotTable(programs.num_slots)
        self._bound = ReadBound.of(programs)
        self.counts: dict[str, float] = dict.fromkeys(_COUNTERS, 0)
        if self._bound:
            self.counts |= dict.fromkeys(_TIMES, 0.0)

    def begin(self, request: Request) -> None:
        """Register a request whose slot's row holds its prompt but for the last token."""
        assert request.slot is not None, "only a request with a slot begins"
        request.num_due = request.response.limit
        last, position = request.prompt[-1], len(request.prompt) - 1
        sampling, seed = request.sampling, request.seed
        self._table.begin(request.slot, last, position, sampling, seed, request.adapter)

    def start(
        self, params: Any, state: DecodeState, version: int, running: Mapping[int, Request]
    ) -> tuple[DecodeState, Steps | None]:
        """Start a step for every running request that is ready, or return None if there is none.

        The other requests are held: their slots do not change, and their later samples stay the
        same. Several steps start in one dispatch if no request reaches its limit in them and none
        is sequential. If a request ends earlier, its remaining steps are wasted. Donates `state`.
        """
        requests = {slot: request for slot, request in running.items() if request.is_ready}
        if not requests:
            return state, None
        adjustment = self._adjustment(requests)
        number = min(request.num_due for request in requests.values())
        is_single = adjustment is not None or any(r.is_sequential for r in running.values())
        most = self._programs.steps_per_dispatch
        number = 1 if is_single or number < most else most
        if self._bound:
            contexts = self._table.positions(list(requests)) + 1
            self.counts["decode_bound_s"] += self._bound.seconds(contexts, number)
        state, sampled = self._programs.generate(
            params,
            state,
            self._table,
            list(requests),
            adjustment=adjustment,
            steps=number,
            has_filters=any(request.sampling.has_filters for request in requests.values()),
        )
        for request in requests.values():
            request.num_due -= number
            request.is_unread = request.is_sequential
        self.counts["steps"] += number
        self.counts["adjusted_steps"] += adjustment is not None
        return state, Steps(requests, sampled, version, number)

    def count_time(self, seconds: float) -> None:
        """Count the time of a turn that decoded."""
        if self._bound:
            self.counts["decode_s"] += seconds

    def read(self, steps: Steps) -> Iterator[tuple[Request, SampledToken]]:
        """Yield the tokens in the order they were sampled. Waits for the device.

        A request that has finished gets none. An earlier token of these steps may have finished it.
        """
        if all(request.finished for request in steps.requests.values()):
            self.counts["tokens_past_end"] += steps.number * len(steps.requests)
            return
        packed = jax.device_get(steps.sampled)  # the only device transfer
        for one in packed if steps.number > 1 else packed[None]:
            sampled = unpack_sampled(one)
            tokens, behavior = sampled.tokens.tolist(), sampled.behavior_logprobs.tolist()
            drawn, tempered = sampled.sampling_logprobs.tolist(), sampled.tempered_logprobs.tolist()
            for slot, request in steps.requests.items():
                if request.finished:
                    self.counts["tokens_past_end"] += 1
                    continue
                self.counts["tokens_generated"] += 1
                request.is_unread = False
                yield (
                    request,
                    SampledToken(
                        tokens[slot],
                        behavior[slot],
                        drawn[slot],
                        tempered[slot],
                        steps.version,
                        forced=request.adjuster is not None and request.adjuster.forced,
                        top_logprobs=_top(sampled, slot, request.sampling.top_logprobs),
                    ),
                )

    def _adjustment(self, requests: Mapping[int, Request]) -> Adjustment | None:
        """Return new changes to the slots' logits for this step, or None if there are none."""
        adjusters = {slot: r.adjuster for slot, r in requests.items() if r.adjuster}
        biases = {slot: adjuster for slot, adjuster in adjusters.items() if adjuster.has_bias}
        masks = {slot: adjuster.matcher for slot, adjuster in adjusters.items() if adjuster.matcher}
        has_likeliest = any(request.sampling.top_logprobs for request in requests.values())
        if not (biases or masks or has_likeliest):
            return None
        adjustment = self._programs.adjustment(bool(biases), has_likeliest)
        for slot, adjuster in biases.items():
            adjuster.add_to(adjustment.bias[slot])
        for slot, matcher in masks.items():
            adjustment.allowed[slot] = matcher.packed()
        return adjustment


def _top(sampled: Sampled, slot: int, number: int) -> TopLogprobs:
    if number == 0:
        return ()
    best = sampled.likeliest
    assert best is not None, "the step returns them if any request asks for them"
    ids, logprobs = best.ids[slot, :number], best.logprobs[slot, :number]
    return tuple(zip(ids.tolist(), logprobs.tolist(), strict=True))
