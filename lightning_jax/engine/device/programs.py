"""Pure functions that the engine compiles, and the decode state.

`slots.SlotPrograms` decides how each one is jitted and which arguments it donates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from lightning_jax.engine.device.table import after_step, pack_sampled, read_rows, takes_part
from lightning_jax.engine.sampling import Adjustment, Work, sample
from lightning_jax.models.attention.kv_cache import KVCache, init_cache, join_caches
from lightning_jax.models.shape import DecoderConfig
from lightning_jax.models.transformer import Params, forward, unembed
from lightning_jax.types import Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """State that a generate step reads and changes, besides the weights."""

    cache: Leaf  # KVCache of S rows
    tokens: Leaf  # int32 [S], sampled last; not read in a request's first step


def init_state(
    *, config: DecoderConfig, slots: int, length: int, dtype: Any, platform: str = "cpu"
) -> DecodeState:
    cache = init_cache(config.shape, slots, length, dtype, platform)
    return DecodeState(cache, jnp.zeros(slots, jnp.int32))


class PromptColumn(IntEnum):
    """Columns of a batch of chunks of prompts, int32 [B, 4 + T], before their T tokens."""

    ROW = 0
    START = 1
    LENGTH = 2
    ADAPTER = 3


def prefill(
    params: Params, cache: KVCache, prompts: Int32[Array, "B _"], *, config: DecoderConfig
) -> KVCache:
    """Return the cache with the first LENGTH tokens of each chunk written to ROW, from START on."""
    numbers, tokens = jnp.split(prompts, [len(PromptColumn)], axis=1)
    starts, lengths = numbers[:, PromptColumn.START], numbers[:, PromptColumn.LENGTH]
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    # A position past the end writes nothing.
    positions = jnp.where(index < lengths[:, None], starts[:, None] + index, cache.length)
    _, written = forward(
        params,
        config,
        tokens,
        positions,
        cache=cache,
        rows=numbers[:, PromptColumn.ROW],
        adapters=_chosen(config, numbers[:, PromptColumn.ADAPTER]),
    )
    assert written is not None, "the program returns the cache it was given"
    return written


def _chosen(config: DecoderConfig, adapters: Int32[Array, " B"]) -> Int32[Array, " B"] | None:
    return None if config.execution.num_adapters is None else adapters


def generate(
    params: Params,
    state: DecodeState,
    table: Int32[Array, "S 17"],
    adjustment: Adjustment | None = None,
    *,
    config: DecoderConfig,
    segments: int,
    rows: int,
    work: Work | None = None,
) -> tuple[DecodeState, Int32[Array, "F R"]]:
    """Feed the next token of each active slot in the first `rows`, and sample one token after it.

    Other slots do not change, nor do those whose response has ended. What was sampled is packed,
    see `table`.
    """
    slots = read_rows(table[:rows])
    fed = jnp.where(slots.is_first, slots.token, state.tokens[:rows])
    is_active = takes_part(slots, fed)
    # An inactive slot writes past the end, which is dropped: other requests may copy its row.
    positions = jnp.where(is_active, slots.position, state.cache.length)
    parts = state.cache.split()
    hidden, written = forward(
        params,
        config,
        fed[:, None],
        positions[:, None],
        cache=join_caches(parts[:segments]),
        adapters=_chosen(config, slots.adapter),
    )
    assert written is not None, "the program returns the cache it was given"
    cache = join_caches([written, *parts[segments:]])
    logits = unembed(params, config, hidden[:, 0])
    keys = jax.vmap(jax.random.fold_in)(
        jax.random.wrap_key_data(slots.key, impl="threefry2x32"), slots.count
    )
    temperature = jnp.where(is_active, slots.temperature, 0.0)  # greedy is cheapest
    filters = slots.top_p, slots.top_k, slots.min_p
    sampled = sample(logits, keys, temperature, *filters, adjustment, work)
    last = jnp.where(is_active, sampled.tokens, fed)
    return DecodeState(cache, state.tokens.at[:rows].set(last)), pack_sampled(sampled, is_active)


def generate_steps(
    weights: Sequence[Params],
    state: DecodeState,
    table: Int32[Array, "S 17"],
    *,
    config: DecoderConfig,
    segments: int,
    rows: int,
    steps: int,
    work: Work | None = None,
) -> tuple[DecodeState, Int32[Array, "N F R"]]:
    """Run `steps` generate steps. The result has a leading axis for them.

    A slot whose response ends is left out from its next step on. `weights` are those of the model,
    once for all steps or once for each. XLA for GPUs copies a layer out of its stack where the
    stack comes into a loop or is read several times, and reads it in place where it is an argument
    that one step reads. So stacked weights are passed once for each step, and there is no loop.
    """
    step = partial(generate, config=config, segments=segments, rows=rows, work=work)
    results = []
    for index in range(steps):
        state, sampled = step(weights[index % len(weights)], state, table)
        # Otherwise log-probabilities are computed after all steps, and all logits wait for them.
        state, sampled = jax.lax.optimization_barrier((state, sampled))
        table = after_step(table)
        results.append(sampled)
    return state, jnp.stack(results)
