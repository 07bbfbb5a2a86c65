"""Rotary positions, and attention within a row of tokens."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from lightning_jax.models.attention import blockwise, flash, flash_gpu, flash_tokamax, flash_tpu
from lightning_jax.models.attention.blockwise import ENDLESS, MASKED, Window
from lightning_jax.models.mesh import partition
from lightning_jax.models.shape import LinearScaling, LongRope, RopeScaling

# Cosine and sine of every angle, in float32.
RopeTables = tuple[Float[Array, "B T 1 F"], Float[Array, "B T 1 F"]]

# Names of results that a layer's backward pass may keep, so that attention does not run again.
RESULTS = ("attention_out", "attention_log_sums")
_SMALL = 128 * 128  # query-key pairs; up to this many, all scores are computed at once
_CPU_BLOCK = 128  # the scores of a block fit in a core's cache
_DEFAULT_BLOCK = 1024  # on other platforms, few large products are faster than many small ones


def rope_frequencies(
    size: int, theta: float, scaling: RopeScaling | LinearScaling | LongRope | None
) -> Float[Array, " F"]:
    """Return the radians per position of each of the size / 2 rotated pairs.

    LinearScaling divides all by one factor, LongRope each by its short factor. RopeScaling divides
    those with wavelengths above `original_max_positions / low_freq_factor` tokens by `factor`.
    Wavelengths below `original_max_positions / high_freq_factor` are unchanged, and those in
    between are blended.
    """
    frequencies = theta ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
    if scaling is None:
        return frequencies
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
    if isinstance(scaling, LongRope):
        return frequencies / jnp.asarray(scaling.short_factors, jnp.float32)
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = jnp.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / scaling.factor)


def rope_tables(positions: Int[Array, "B T"], frequencies: Float[Array, " F"]) -> RopeTables:
    """Return the cosines and sines of these positions, computed once for all layers."""
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies[None, None, None, :]

    def by_loop(angles: Array) -> tuple[Array, Array]:
        # XLA cannot recompute a loop's result where it is used. Without the loop, XLA on a CPU
        # recomputes cosine and sine for every head of every layer and of its gradient.
        tables = jax.lax.map(
            lambda is_sine: jnp.where(is_sine, jnp.sin(angles), jnp.cos(angles)),
            jnp.array([False, True]),
        )
        return tables[0], tables[1]

    def at_once(angles: Array) -> tuple[Array, Array]:
        return jnp.cos(angles), jnp.sin(angles)

    return jax.lax.platform_dependent(angles, cpu=by_loop, default=at_once)


def rotate(
    x: Float[Array, "B T N D"], cos: Float[Array, "B T 1 F"], sin: Float[Array, "B T 1 F"]
) -> Float[Array, "B T N D"]:
    """Rotate the first 2F elements of `x` by its position. Element i is paired with i + F."""
    size = 2 * cos.shape[-1]
    first, second = jnp.split(x[..., :size].astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    turned, rest = turned.astype(x.dtype), x[..., size:]
    return jnp.concatenate((turned, rest), axis=-1) if rest.size else turned


def attend_tree(
    queries: Float[Array, "B T H D"],
    keys: Float[Array, "B T K D"],
    values: Float[Array, "B T K D"],
    ends: Int[Array, "B T"] | None,
    window: Window | None = None,
) -> Float[Array, "B T H D"]:
    """Return attention within a row: node i sees node j iff `j <= i < ends[j]`.

    Without `ends` attention is causal. With a window, node i sees the last nodes of its path only.
    """
    length = queries.shape[1]
    ends = jnp.full(queries.shape[:2], ENDLESS) if ends is None else ends
    if length**2 > _SMALL:
        return attend_blocks(queries, keys, values, ends, window)
    index = _index(queries)
    key = jnp.arange(length)[None, None, :]
    seen = (key <= index[:, :, None]) & (index[:, :, None] < ends[:, None, :])
    if window is not None:
        seen &= window.first[:, :, None] <= window.depths[:, None, :]
    return attend_masked(queries, keys, values, seen)


def _index(queries: Float[Array, "B T H D"]) -> Int[Array, "B T"]:
    return jnp.broadcast_to(jnp.arange(queries.shape[1]), queries.shape[:2])


@jax.custom_vjp
def attend_blocks(
    queries: Float[Array, "B T H D"],
    keys: Float[Array, "B T K D"],
    values: Float[Array, "B T K D"],
    ends: Int[Array, "B T"],
    window: Window | None = None,
) -> Float[Array, "B T H D"]:
    """Return attention of query i to the keys `j <= i < ends[j]` of its window, by blocks.

    Each query must see at least one key. A TPU uses kernels of its own (flash.py). So does a CUDA
    GPU for which tokamax is not installed or has none (flash_tokamax.py). Other platforms run a
    loop over blocks (blockwise.py).
    """
    return _attend_forward(queries, keys, values, ends, window)[0]


def _attend_forward(*inputs: Any) -> tuple[Array, tuple[Any, ...]]:
    kernels = blockwise.forward, flash_tpu.forward, _for_gpu(inputs[0], inputs[4]).forward
    results = _by_platform(*kernels, *inputs)
    out, log_sums = map(checkpoint_name, results, RESULTS)
    return out, (*inputs, out, log_sums)


def _attend_backward(saved: tuple[Any, ...], out_grad: Array) -> tuple[Array | None, ...]:
    kernels = blockwise.backward, flash_tpu.backward, _for_gpu(saved[0], saved[4]).backward
    queries, keys, values = _by_platform(*kernels, *saved, out_grad)
    return queries, keys, values, None, None


attend_blocks.defvjp(_attend_forward, _attend_backward)


def _for_gpu(queries: Any, window: Window | None) -> Any:
    """Return the module with the kernels of a CUDA GPU."""
    return flash_tokamax if flash_tokamax.is_supported(queries, window) else flash_gpu


def _by_platform(loop: Callable[..., Any], tpu: Any, gpu: Any, *arrays: Any) -> Any:
    queries, keys, values, *rest = arrays
    arrays = (queries, keys, values, _index(queries), *rest)
    return jax.lax.platform_dependent(
        *arrays,
        cpu=functools.partial(loop, size=_CPU_BLOCK),
        tpu=flash.per_device(tpu, partition_specs),
        cuda=flash.per_device(gpu, partition_specs),
        default=functools.partial(loop, size=_DEFAULT_BLOCK),
    )


def partition_specs(mesh: Any, *arrays: Any) -> tuple[Any, Any]:
    """Return how a forward or backward kernel is split, by rows and heads, for `flash.per_device`.

    If `tensor` does not divide the key heads, each device computes all heads of its rows.
    """
    keys = arrays[1]
    rows, heads = partition(("rows", "kv_heads"), (keys.shape[0], keys.shape[2]), mesh)
    by_token = jax.P(rows, None, heads, None)
    by_row = jax.P(rows, None)
    by_head = jax.P(rows, heads, None, None)
    inputs = (*(by_token,) * 3, *(by_row,) * 3, by_token, by_head, by_token)
    is_forward = len(arrays) == 6
    outputs = (by_token, by_head) if is_forward else (by_token, by_token, by_token)
    return inputs[: len(arrays)], outputs


def attend_masked(
    queries: Float[Array, "B T H D"],
    keys: Float[Array, "B C K D"],
    values: Float[Array, "B C K D"],
    seen: Bool[Array, "B T C"],
) -> Float[Array, "B T H D"]:
    """Return softmax attention from all scores at once.

    Query head h reads key head h // (H / K).
    """
    rows, length, heads, size = queries.shape
    kv_heads = keys.shape[2]
    grouped = queries.reshape(rows, length, kv_heads, heads // kv_heads, size) * size**-0.5
    scores = jnp.einsum("btkgd,bckd->bkgtc", grouped, keys, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, MASKED), axis=-1)
    out = jnp.einsum("bkgtc,bckd->btkgd", weights.astype(values.dtype), values)
    return out.reshape(queries.shape)
