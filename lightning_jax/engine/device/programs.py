"""Pure functions that the engine compiles, and the decode state.

`slots.SlotPrograms` decides how each one is jitted and which arguments it donates.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from lightning_jax.engine.sampling import Adjustment, Sampled, Work, sample
from lightning_jax.engine.types import SamplingParams
from lightning_jax.models.attention.kv_cache import KVCache, init_cache, join_caches
from lightning_jax.models.shape import DecoderConfig
from lightning_jax.models.transformer import Params, forward, unembed
from lightning_jax.types import Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Start:
    """Next token of a slot, its position, and the sampling settings."""

    token: Leaf  # int32
    position: Leaf  # int32
    key: Leaf  # uint32 [2], data of the request's PRNG key
    temperature: Leaf  # float32
    top_p: Leaf  # float32
    top_k: Leaf  # int32
    min_p: Leaf  # float32
    adapter: Leaf = None  # int32, adapter index; None: the model has at most one


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """State that a generate step reads and changes, besides the weights."""

    cache: Leaf  # KVCache of S rows
    slots: Leaf  # Start, the next token of every slot; each field has a leading axis S
    counts: Leaf  # int32 [S], response tokens sampled so far
    active: Leaf  # bool [S]


def start_of(
    token: int, position: int, sampling: SamplingParams, seed: int, adapter: int | None = None
) -> Start:
    """Return a request's scalars on the host.

    Response token k uses the seed's key folded with k.
    """
    return Start(
        token=np.int32(token),
        position=np.int32(position),
        key=np.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32),
        temperature=np.float32(sampling.temperature),
        top_p=np.float32(sampling.top_p),
        top_k=np.int32(min(sampling.top_k, 2**31 - 1)),
        min_p=np.float32(sampling.min_p),
        adapter=None if adapter is None else np.int32(adapter),
    )


def init_state(
    *, config: DecoderConfig, slots: int, length: int, dtype: Any, platform: str = "cpu"
) -> DecodeState:
    floats, ints = jnp.zeros(slots, jnp.float32), jnp.zeros(slots, jnp.int32)
    keys = jnp.zeros((slots, 2), jnp.uint32)
    chosen = None if config.execution.num_adapters is None else ints
    return DecodeState(
        cache=init_cache(config.shape, slots, length, dtype, platform),
        slots=Start(ints, ints, keys, floats, floats, ints, floats, chosen),
        counts=ints,
        active=jnp.zeros(slots, bool),
    )


def prefill(
    params: Params,
    cache: KVCache,
    rows: Int32[Array, " B"],
    tokens: Int32[Array, "B T"],
    starts: Int32[Array, " B"],
    lengths: Int32[Array, " B"],
    adapters: Int32[Array, " B"] | None = None,
    *,
    config: DecoderConfig,
) -> KVCache:
    """Return the cache with the first `lengths` tokens written to `rows`, starting at `starts`."""
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    # A position past the end writes nothing.
    positions = jnp.where(index < lengths[:, None], starts[:, None] + index, cache.length)
    _, written = forward(
        params, config, tokens, positions, cache=cache, rows=rows, adapters=adapters
    )
    assert written is not None, "the program returns the cache it was given"
    return written


def activate(state: DecodeState, slot: Int32[Array, ""], start: Start) -> DecodeState:
    return replace(
        state,
        slots=jax.tree.map(lambda all_, one: all_.at[slot].set(one), state.slots, start),
        counts=state.counts.at[slot].set(0),
        active=state.active.at[slot].set(True),
    )


def retire(state: DecodeState, keep: Bool[Array, " S"]) -> DecodeState:
    return replace(state, active=state.active & keep)


def generate(
    params: Params,
    state: DecodeState,
    slot_mask: Bool[Array, " S"],
    adjustment: Adjustment | None = None,
    *,
    config: DecoderConfig,
    segments: int,
    rows: int,
    work: Work | None = None,
) -> tuple[DecodeState, Sampled]:
    """Feed the next token of each active slot in the first `rows`, and sample one token after it.

    Slots outside `slot_mask` do not change, even if they are active.
    """
    first = (state.slots, state.active, state.counts)
    slots, active, counts = jax.tree.map(lambda leaf: leaf[:rows], first)
    active &= slot_mask[:rows]
    # An inactive slot writes past the end, which is dropped: other requests may copy its row.
    positions = jnp.where(active, slots.position, state.cache.length)
    parts = state.cache.split()
    hidden, written = forward(
        params,
        config,
        slots.token[:, None],
        positions[:, None],
        cache=join_caches(parts[:segments]),
        adapters=slots.adapter,
    )
    assert written is not None, "the program returns the cache it was given"
    cache = join_caches([written, *parts[segments:]])
    logits = unembed(params, config, hidden[:, 0])
    keys = jax.vmap(jax.random.fold_in)(
        jax.random.wrap_key_data(slots.key, impl="threefry2x32"), counts
    )
    temperature = jnp.where(active, slots.temperature, 0.0)  # greedy is cheapest
    filters = slots.top_p, slots.top_k, slots.min_p
    sampled = sample(logits, keys, temperature, *filters, adjustment, work)
    step = active.astype(jnp.int32)
    slots = replace(
        state.slots,
        token=state.slots.token.at[:rows].set(jnp.where(active, sampled.tokens, slots.token)),
        position=state.slots.position.at[:rows].add(step),
    )
    return DecodeState(cache, slots, state.counts.at[:rows].add(step), state.active), sampled


def generate_steps(
    params: Params,
    state: DecodeState,
    slot_mask: Bool[Array, " S"],
    *,
    config: DecoderConfig,
    segments: int,
    rows: int,
    steps: int,
    work: Work | None = None,
) -> tuple[DecodeState, Sampled]:
    """Run `steps` generate steps. The sampled arrays have a leading axis for them."""
    step = partial(generate, config=config, segments=segments, rows=rows, work=work)

    def decode_once(state: DecodeState, _: None) -> tuple[DecodeState, Sampled]:
        return step(params, state, slot_mask)

    return jax.lax.scan(decode_once, state, None, length=steps)
