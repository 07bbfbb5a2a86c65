"""The policy as prefill, insert and generate over slots; the only holder of the KV cache.

A slot is one row of the decode batch. `prefill` computes the keys and values of a prompt but for
its last token, `insert` puts them into a slot, and the last prompt token rides the next `generate`
step, as every token does. So there is one place that samples, and requests with the same prompt
share all of its prefill. A row is its slot's; what outlives it is copied to `pages`.

All functions take the state and return the new one; what they say they donate, the caller may not
touch again. What they compile is in programs.py.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from lightning_jax.config import ConfigError, ServeConfig
from lightning_jax.models.cache import segment_lengths
from lightning_jax.models.lora import pick
from lightning_jax.models.matmul import turn_kernels
from lightning_jax.models.sharding import cache_sharding, param_shardings, reshard
from lightning_jax.models.transformer import DecoderConfig
from lightning_jax.serve import programs
from lightning_jax.serve.pages import PageCopier
from lightning_jax.serve.programs import DecodeState, Start, start_of
from lightning_jax.serve.sampling import Sampled
from lightning_jax.serve.scheduler import plan_chunks
from lightning_jax.types import Leaf, SamplingParams

Params = Any


@dataclass(frozen=True)
class Prefix:
    """Keys and values of a sequence's first `length` tokens; what follows in the row is garbage."""

    cache: Leaf  # KVCache of one row
    length: int

    @property
    def capacity(self) -> int:
        return self.cache.length


# `length` is static: a prefix is handed to jit by its cache, never whole.
jax.tree_util.register_dataclass(Prefix, data_fields=["cache"], meta_fields=["length"])


class Engine:
    """Compiled functions for one model shape and one slot layout. Holds no weights and no state."""

    def __init__(
        self,
        config: DecoderConfig,
        serve: ServeConfig,
        *,
        dtype: str = "float32",
        mesh: jax.sharding.Mesh | None = None,
    ) -> None:
        if serve.max_len > config.max_positions:
            raise ConfigError(
                f"serve.max_len is {serve.max_len}; expected at most the model's "
                f"{config.max_positions} positions. Lower serve.max_len."
            )
        self.config, self.mesh = replace(config, turned=_on_one_cpu(mesh)), mesh
        self.num_slots, self.max_len = serve.slots, serve.max_len
        self.steps_per_dispatch = serve.steps_per_dispatch
        lengths = {min(bucket, serve.max_len) for bucket in serve.prefill_buckets}
        self.buckets = tuple(sorted(lengths))
        self.capacities = tuple(itertools.accumulate(segment_lengths(serve.max_len)))
        self.slot_counts = _slot_counts(serve.slots)
        self._dtype = jnp.dtype(dtype)
        self._plain, self._cache = _shardings(mesh, config)
        self.pages = PageCopier(config, serve, self._dtype, self._cache)
        self._compile_later()

    def _compile_later(self) -> None:
        plain, cache = self._plain, self._cache
        state = DecodeState(cache, plain, plain, plain)
        sizes = {"config": self.config, "dtype": self._dtype}
        init = partial(programs.init_state, slots=self.num_slots, max_len=self.max_len, **sizes)
        prefill = partial(programs.prefill_chunk, config=self.config)
        generate = partial(programs.generate, config=self.config)
        self._init = jax.jit(init, out_shardings=state)
        self._empty = jax.jit(
            partial(programs.empty_prefix, **sizes), static_argnums=0, out_shardings=cache
        )
        self._prefill = jax.jit(prefill, donate_argnums=1, out_shardings=cache)
        self._extract = jax.jit(programs.extract_row, static_argnums=2, out_shardings=cache)
        self._insert = jax.jit(programs.insert_row, donate_argnums=0, out_shardings=state)
        self._activate = jax.jit(programs.activate, donate_argnums=0, out_shardings=state)
        self._retire = jax.jit(programs.retire, donate_argnums=0, out_shardings=state)
        self._generate = jax.jit(
            generate,
            static_argnames=("segments", "rows"),
            donate_argnums=1,
            out_shardings=(state, plain),
        )
        several = partial(
            programs.generate_several, config=self.config, steps=self.steps_per_dispatch
        )
        self._generate_several = jax.jit(
            several,
            static_argnames=("segments", "rows"),
            donate_argnums=1,
            out_shardings=(state, plain),
        )
        # Its own program, because most steps need neither the bias nor the likeliest tokens.
        self._generate_biased = jax.jit(
            partial(generate, segments=len(self.capacities), rows=self.num_slots),
            donate_argnums=1,
            out_shardings=(state, plain),
        )

    def place(self, params: Params) -> Params:
        """A copy of the weights, or of some of them, as the engine computes with them, there when
        this returns; the originals may be donated.
        """
        targets: Any = self._plain
        if self.mesh is not None:
            shape = replace(self.config, turned=False)
            targets = pick(param_shardings(shape, self.mesh), params)
        placed = reshard(params, targets, self._dtype)
        return jax.block_until_ready(turn_kernels(placed)) if self.config.turned else placed

    def init_state(self) -> DecodeState:
        """All slots empty and inactive."""
        return self._init()

    def capacity_for(self, length: int) -> int:
        """The shortest compiled row length that holds `length` tokens. ValueError if none does."""
        for capacity in self.capacities:
            if capacity >= length:
                return capacity
        raise ValueError(
            f"a sequence of {length} tokens does not fit; expected at most {self.max_len}. "
            "Raise serve.max_len or shorten the prompt."
        )

    def _segments_for(self, length: int) -> int:
        return self.capacities.index(self.capacity_for(length)) + 1

    def _buckets_for(self, capacity: int) -> tuple[int, ...]:
        """Chunks for rows of this length: not longer than the row, unless all are."""
        return tuple(b for b in self.buckets if b <= capacity) or self.buckets[:1]

    def prefill(
        self,
        params: Params,
        ids: Sequence[int],
        existing_prefix: Prefix | None = None,
        adapter: int | None = None,
    ) -> Prefix:
        """The prefix extended by `ids`, in chunks of bucket lengths. Donates `existing_prefix`.

        Of a model with several adapters, `adapter` is the one to read with, the slot's, too.
        ValueError if the result is longer than the existing prefix's capacity, or than any.
        """
        start = existing_prefix.length if existing_prefix else 0
        total = start + len(ids)
        capacity = existing_prefix.capacity if existing_prefix else self.capacity_for(total)
        if capacity < total:
            raise ValueError(
                f"the prefix has room for {capacity} tokens; expected {total}. "
                "Extract it with that capacity."
            )
        cache = existing_prefix.cache if existing_prefix else self._empty(capacity)
        tokens = np.asarray(ids, np.int32)
        chosen = None if adapter is None else np.int32(adapter)
        done = 0
        for bucket in plan_chunks(len(ids), self._buckets_for(capacity)):
            chunk = tokens[done : done + bucket]
            padded = np.pad(chunk, (0, bucket - len(chunk)))
            cache = self._prefill(
                params, cache, padded, np.int32(start + done), np.int32(len(chunk)), chosen
            )
            done += len(chunk)
        return Prefix(cache, total)

    def extract(self, state: DecodeState, slot: int, length: int, capacity: int) -> Prefix:
        """A copy of the first `length` tokens of a slot's row, with room for `capacity`."""
        segments = self._segments_for(capacity)
        return Prefix(self._extract(state.cache, np.int32(slot), segments), length)

    def insert(self, prefix: Prefix, state: DecodeState, slot: int, start: Start) -> DecodeState:
        """The state with `prefix` in the slot's row and the slot active. Donates `state`."""
        return self._insert(state, prefix.cache, np.int32(slot), start)

    def activate(self, state: DecodeState, slot: int, start: Start) -> DecodeState:
        """As `insert`, for a slot whose row holds the prefix already. Donates `state`."""
        return self._activate(state, np.int32(slot), start)

    def generate(
        self,
        params: Params,
        state: DecodeState,
        longest: int | None = None,
        bias: Float32[np.ndarray, "S V"] | None = None,
        num_slots: int | None = None,
        steps: int = 1,
    ) -> tuple[DecodeState, Sampled]:
        """One token for every active slot; rows of the others stay as they are. Donates `state`.

        With `steps`, which is 1 or `steps_per_dispatch`, as many tokens, and each array of the
        result has a leading axis for them; not with a `bias`, and of no slot past its row's end.

        `longest` bounds the number of tokens of any active row, these included; less of the
        cache is read. With `num_slots` only that many first slots may be active; the step is that
        much smaller, and its result has at least that many rows. `bias` is added to the logits
        before all else, -inf forbids a token; with it the result holds the likeliest tokens too,
        and `longest` and `num_slots` save nothing. It must not change before the step is done.
        """
        if bias is not None:
            return self._generate_biased(params, state, bias)
        segments = self._segments_for(self.max_len if longest is None else longest)
        wanted = self.num_slots if num_slots is None else num_slots
        rows = next(n for n in self.slot_counts if n >= wanted)
        program = self._generate if steps == 1 else self._generate_several
        return program(params, state, segments=segments, rows=rows)

    def retire(self, state: DecodeState, slots: Iterable[int]) -> DecodeState:
        """The state with these slots inactive; their rows stay readable. Donates `state`."""
        keep = np.ones(self.num_slots, bool)
        keep[list(slots)] = False
        return self._retire(state, keep)

    @property
    def compiles(self) -> int:
        """How many programs were compiled so far."""
        functions = (self._init, self._empty, self._prefill, self._extract)
        functions += (self._insert, self._activate, self._retire, self._generate)
        functions += (self._generate_several, self._generate_biased)
        compiled: Any = functions
        return self.pages.compiles + sum(function._cache_size() for function in compiled)

    def warmup(self, params: Params, state: DecodeState) -> DecodeState:
        """Compiles every program but `pages`'s by running it; no slot is active afterwards.

        Donates `state`.
        """
        adapter = None if self.config.num_adapters is None else 0
        start = start_of(0, 0, SamplingParams(), 0, adapter)
        state = self.activate(state, 0, start)
        for capacity in self.capacities:
            prefix = Prefix(self._empty(capacity), 0)
            for bucket in self._buckets_for(capacity):
                tokens, chosen = np.zeros(bucket, np.int32), start.adapter
                cache = self._prefill(
                    params, prefix.cache, tokens, np.int32(0), np.int32(0), chosen
                )
                prefix = Prefix(cache, 0)
            state = self.insert(prefix, state, 0, start)
            self.extract(state, 0, 0, capacity)
            for count, steps in itertools.product(self.slot_counts, {1, self.steps_per_dispatch}):
                state, _ = self.generate(params, state, capacity, num_slots=count, steps=steps)
        bias = np.zeros((self.num_slots, self.config.vocab_size), np.float32)
        state, _ = self.generate(params, state, bias=bias)
        return jax.block_until_ready(self.retire(state, range(self.num_slots)))


def _slot_counts(slots: int) -> tuple[int, ...]:
    """How many slots decode programs are compiled for: 16 gives 1, 4, 8, 16.

    Up to four the weights are what a step waits for, so that one program serves 2 to 4.
    """
    counts = [1, *(2**power for power in range(2, slots.bit_length()))]
    return (*(count for count in counts if count < slots), slots)


def _on_one_cpu(mesh: jax.sharding.Mesh | None) -> bool:
    devices = jax.devices()[:1] if mesh is None else mesh.devices.flat
    return len(devices) == 1 and devices[0].platform == "cpu"


def _shardings(mesh: jax.sharding.Mesh | None, config: DecoderConfig) -> tuple[Any, Any]:
    """Where small arrays and where the cache lives.

    Everything is placed on purpose: a program compiles again for an array that JAX may move.
    """
    if mesh is None:
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return device, device
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return replicated, cache_sharding(config, mesh)
