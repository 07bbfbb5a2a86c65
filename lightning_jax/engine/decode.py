"""Decode steps of the running requests: start them on the device, then read the sampled tokens."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from lightning_jax.engine.device.programs import DecodeState
from lightning_jax.engine.device.radix import Node
from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.engine.device.table import NO_TOKEN, End, SlotTable, unpack_sampled
from lightning_jax.engine.generation import Generation
from lightning_jax.engine.logits import LogitAdjuster
from lightning_jax.engine.response import Response, pack_records
from lightning_jax.engine.sampling import Adjustment, Likeliest
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
    has_begun: bool = False  # its first token was handed out
    finished: bool = False
    ends_on_device: bool = False  # the device knows all that ends its response by itself
    runs_on: bool = False  # it has finished, which the device does not know
    is_unread: bool = False  # its next token depends on a sampled token not read yet

    @cached_property
    def is_sequential(self) -> bool:
        """True if its next step needs the token of the last one."""
        return self.adjuster is not None and self.adjuster.depends_on_tokens

    @cached_property
    def _follows_tokens(self) -> bool:
        return self.adjuster is not None or bool(self.sampling.stop)

    @property
    def is_watched(self) -> bool:
        """True if each of its tokens is looked at, and not only appended to its response."""
        return self.generation.is_followed or not self.has_begun or self._follows_tokens

    @property
    def is_ready(self) -> bool:
        """True if it can take part in the next step."""
        waits = self.adjuster is not None and not self.adjuster.is_ready
        return self.num_due > 0 and not self.is_unread and not waits


@dataclass(frozen=True)
class Steps:
    """Decode steps started on the device in one dispatch, and their requests."""

    requests: Mapping[int, Request]  # by slot
    contexts: Int[np.ndarray, " R"] | None  # their tokens that the first step reads, if counted
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
    token_s: Mapping[int | None, float]  # to read a token's keys and values in layers of a window

    @classmethod
    def of(cls, programs: SlotPrograms) -> "ReadBound | None":
        """Return the bound of a model's programs, or None if the devices' bandwidth is unknown."""
        devices = sorted(programs.devices, key=lambda device: device.id)
        accelerator = find_accelerator(devices[0].device_kind)
        if accelerator is None:
            return None
        mesh = programs.mesh or make_mesh(MeshConfig(fsdp=1), devices)
        weights, tokens = decode_bytes(programs.config, mesh, programs.dtype)
        rate = accelerator.bandwidth
        return cls(weights / rate, {window: size / rate for window, size in tokens.items()})

    def seconds(
        self, contexts: Int[np.ndarray, " R"], numbers: Int[np.ndarray, " R"], steps: int
    ) -> float:
        """Return the bound of some steps in which rows make these numbers of tokens.

        The rows begin with contexts of these lengths, and each token makes its row longer.
        """
        read = numbers * contexts + numbers * (numbers - 1) // 2
        seconds = steps * self.step_s
        for window, token_s in self.token_s.items():
            beyond = 0
            if window is not None:  # the last step of a row has the most tokens before its window
                most = np.maximum(contexts + numbers - 1 - window, 0)
                steps_beyond = np.minimum(most, numbers)
                beyond = steps_beyond * (2 * most - steps_beyond + 1) // 2
            seconds += int((read - beyond).sum()) * token_s
        return seconds


class Stepper:
    """Runner that starts decode steps and reads their tokens. The caller holds the decode state."""

    def __init__(self, programs: SlotPrograms, eos_ids: Collection[int]) -> None:
        self._programs = programs
        self._table = SlotTable(programs.num_slots)
        self._eos_ids = np.array(sorted(eos_ids), np.int32)
        self._ignores_eos = np.zeros(programs.num_slots, bool)
        self._num_left = np.zeros(programs.num_slots, np.int32)  # tokens to hand out until limits
        self._bound = ReadBound.of(programs)
        self.counts: dict[str, float] = dict.fromkeys(_COUNTERS, 0)
        if self._bound:
            self.counts |= dict.fromkeys(_TIMES, 0.0)

    def begin(self, request: Request) -> None:
        """Register a request whose slot's row holds its prompt but for the last token."""
        assert request.slot is not None, "only a request with a slot begins"
        slot, sampling = request.slot, request.sampling
        self._num_left[slot] = request.response.limit
        self._ignores_eos[slot] = sampling.ignore_eos
        end = End(request.response.limit, () if sampling.ignore_eos else request.response.eos_ids)
        request.num_due = end.limit
        request.ends_on_device = end.is_whole and not sampling.stop
        last, position = request.prompt[-1], len(request.prompt) - 1
        self._table.begin(slot, last, position, sampling, request.seed, request.adapter, end)

    def start(
        self, params: Any, state: DecodeState, version: int, running: Mapping[int, Request]
    ) -> tuple[DecodeState, Steps | None]:
        """Start a step for every running request that is ready, or return None if there is none.

        The other requests are held: their slots do not change, and their later samples stay the
        same. Several steps start in one dispatch if some request has as many left, and the device
        knows all that ends a response by itself. So none takes a step past its end. What comes
        meanwhile, such as a request or new weights, waits for the steps that have started. These
        are at most `steps_per_dispatch`, and as many ahead. Donates `state`.
        """
        requests = {slot: request for slot, request in running.items() if request.is_ready}
        if not requests:
            return state, None
        adjustment = self._adjustment(requests)
        number = self._programs.steps_per_dispatch
        if number > 1 and not self._can_run_on(number, requests, running, adjustment):
            number = 1
        contexts = self._table.positions(list(requests)) + 1 if self._bound else None
        state, sampled = self._programs.generate(
            params,
            state,
            self._table,
            list(requests),
            adjustment=adjustment,
            steps=number,
            has_filters=any(request.sampling.has_filters for request in requests.values()),
        )
        number = len(sampled) if sampled.ndim > 2 else 1
        for request in requests.values():
            request.num_due -= min(number, request.num_due)
            request.is_unread = request.is_sequential
        self.counts["steps"] += number
        self.counts["adjusted_steps"] += adjustment is not None
        return state, Steps(requests, contexts, sampled, version, number)

    def _can_run_on(
        self,
        number: int,
        requests: Mapping[int, Request],
        running: Mapping[int, Request],
        adjustment: Adjustment | None,
    ) -> bool:
        """Return True if the requests can take some steps before the host reads their tokens."""
        has_room = any(request.num_due >= number for request in requests.values())
        are_bound = any(request.is_sequential for request in running.values())
        know_ends = all(request.ends_on_device for request in requests.values())
        return has_room and know_ends and not are_bound and adjustment is None

    def count_time(self, seconds: float) -> None:
        """Count the time of a turn that decoded."""
        if self._bound:
            self.counts["decode_s"] += seconds

    def read(self, steps: Steps) -> Iterator[tuple[Collection[Request], list[bool]]]:
        """Append the tokens of each step to their responses. Waits for the device.

        Yield a step's requests, and for each one whether its token is an end of turn or reaches the
        limit. A request that has finished gets none. An earlier token of these steps may have
        finished it.
        """
        if all(request.finished for request in steps.requests.values()):
            running_on = sum(request.runs_on for request in steps.requests.values())
            self.counts["tokens_past_end"] += steps.number * running_on
            return
        packed = jax.device_get(steps.sampled)  # the only device transfer
        packed = packed if steps.number > 1 else packed[None]
        if self._bound and steps.contexts is not None:
            numbers = (packed[:, 0, list(steps.requests)] != NO_TOKEN).sum(axis=0)
            bound_s = self._bound.seconds(steps.contexts, numbers, steps.number)
            self.counts["decode_bound_s"] += bound_s
        for one in packed:
            # Without those whose response has ended before this step.
            sampled = {slot: r for slot, r in steps.requests.items() if one[0, slot] != NO_TOKEN}
            requests = {slot: r for slot, r in sampled.items() if not r.finished}
            self.counts["tokens_past_end"] += len(sampled) - len(requests)
            self.counts["tokens_generated"] += len(requests)
            if requests:
                yield requests.values(), self._append(requests, one, steps.version)

    def _append(
        self, requests: Mapping[int, Request], packed: Int[np.ndarray, "F R"], version: int
    ) -> list[bool]:
        slots = np.fromiter(requests, np.intp, len(requests))
        sampled, forced = packed[:4, slots], []
        for index, request in enumerate(requests.values()):
            if request.adjuster is not None:
                request.is_unread = False
                if request.adjuster.forced:
                    forced.append(index)
        records = pack_records(sampled, version, forced)
        for request, record in zip(requests.values(), records, strict=True):
            request.response.append(record)
        if len(packed) > 4 and (best := unpack_sampled(packed).likeliest):
            for slot, request in requests.items():
                if number := request.sampling.top_logprobs:
                    request.response.top_logprobs.append(_top(best, slot, number))
        self._num_left[slots] -= 1
        has_eos = (sampled[0][:, None] == self._eos_ids).any(axis=1) & ~self._ignores_eos[slots]
        return (has_eos | (self._num_left[slots] <= 0)).tolist()

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


def _top(best: Likeliest, slot: int, number: int) -> TopLogprobs:
    ids, logprobs = best.ids[slot, :number], best.logprobs[slot, :number]
    return tuple(zip(ids.tolist(), logprobs.tolist(), strict=True))
