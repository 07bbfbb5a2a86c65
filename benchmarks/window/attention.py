"""Attention alone: of a decode step to the cache, and of an update within rows of trees."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from window.cases import Figure, Setting, failed
from window.timing import median_s, seconds_a_run

NEEDS_GPU = "skipped: needs a GPU"


# A decode step.


@dataclass(frozen=True)
class CacheShape:
    """Decode attention of S slots with `used` tokens, in rows of `length`, by several layers."""

    layers: int = 8  # their keys and values do not fit in a GPU's cache
    slots: int = 64
    heads: int = 12
    kv_heads: int = 2
    size: int = 128
    length: int = 768
    used: int = 640

    @property
    def ends(self) -> Any:
        """Return the number of tokens of each slot."""
        import jax.numpy as jnp

        return jnp.full(self.slots, self.used, jnp.int32)


class Decode(NamedTuple):
    """Attention of one layer, from (queries [S 1 H D], keys, values, layer).

    The cache of all layers is one array of keys and one of values. The first axis is layer * slot.
    """

    attend: Callable[..., Any]
    kv_shape: tuple[int, ...]  # of a layer


def project_decode(shape: CacheShape, *, is_plain: bool = False) -> Decode:
    """Return attention by the project's kernel, or with all scores at once."""
    from unittest import mock

    import jax
    import jax.numpy as jnp

    from lightning_jax.models.attention import flash_cache, kv_cache

    def attend(queries: Any, keys: Any, values: Any, layer: int) -> Any:
        at = jnp.full((shape.slots, 1), shape.used - 1, jnp.int32)
        rows = layer * shape.slots + jnp.arange(shape.slots, dtype=jnp.int32)
        cache = kv_cache.LayerCache((keys,), (values,), True)
        if not is_plain:
            return kv_cache.attend_cache(queries, cache, at, rows)
        # A row whose length is no multiple of the kernels' blocks is read without them.
        with mock.patch.object(flash_cache, "SIZE", shape.length + 1):
            return kv_cache.attend_cache(queries, cache, at, rows)

    width = flash_cache.kernel_width(jax.default_backend(), shape.size)
    return Decode(attend, (shape.slots, shape.kv_heads, shape.length, width))


def _of_layer(shape: CacheShape, layer: int, cache: Any) -> Any:
    """Return one layer's part of the cache, which is read in place."""
    rows = cache.shape[0] // shape.layers
    return cache[layer * rows : (layer + 1) * rows]


def tokamax_decode(shape: CacheShape, *, is_folded: bool = False) -> Decode:
    """Return attention by tokamax, with the cache as [S C K D].

    Folded, the heads that share a key head are the queries of one kernel program.
    """
    from lightning_jax.models.attention import flash_tokamax
    from lightning_jax.models.tokamax_library import conventions

    operation = flash_tokamax._operation(False)

    def attend(queries: Any, keys: Any, values: Any, layer: int) -> Any:
        sides = (_of_layer(shape, layer, side) for side in (keys, values))
        mask = flash_tokamax._module("base").Mask(k_end=shape.ends[:, None, None])
        with conventions():
            bound = operation.bind(queries, *sides, mask=mask)
            sizes = operation._get_heuristics_config_impl(bound, fold_q_sequence_heads=is_folded)
            return operation.replace(config=sizes)(*bound.args, mask=mask)

    return Decode(attend, (shape.slots, shape.length, shape.kv_heads, shape.size))


def tokamax_in_place(shape: CacheShape) -> Decode:
    """Return attention by tokamax, with the cache as the project has it, [S K C D].

    A key head of a slot is a row of its own, and the heads that share it are its queries.
    """
    from lightning_jax.models.attention import flash_tokamax
    from lightning_jax.models.tokamax_library import conventions

    operation = flash_tokamax._operation(False)
    group = shape.heads // shape.kv_heads

    def attend(queries: Any, keys: Any, values: Any, layer: int) -> Any:
        sides = (_of_layer(shape, layer, side)[..., None, :] for side in (keys, values))
        by_head = queries.reshape(shape.slots, shape.kv_heads, group, 1, shape.size)
        mask = flash_tokamax._module("base").Mask(k_end=shape.ends[:, None, None, None])
        with conventions():
            return operation(by_head, *sides, mask=mask).reshape(queries.shape)

    return Decode(attend, (shape.slots, shape.kv_heads, shape.length, shape.size))


def cudnn_padded(shape: CacheShape) -> Decode:
    """Return attention by cuDNN to rows of tokens."""
    import jax.numpy as jnp
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    def attend(queries: Any, keys: Any, values: Any, layer: int) -> Any:
        return cudnn.dot_product_attention(
            queries,
            *(_of_layer(shape, layer, side) for side in (keys, values)),
            q_seqlen=jnp.ones(shape.slots, jnp.int32),
            kv_seqlen=shape.ends,
            mask_type=cudnn.MaskType.PADDING,
            scale=shape.size**-0.5,
        )

    return Decode(attend, (shape.slots, shape.length, shape.kv_heads, shape.size))


def cudnn_paged(shape: CacheShape) -> Decode:
    """Return attention by cuDNN to pages of 64 tokens."""
    import jax.numpy as jnp
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    page = 64
    per_row = shape.length // page

    def attend(queries: Any, keys: Any, values: Any, layer: int) -> Any:
        pages = jnp.arange(shape.slots * per_row, dtype=jnp.int32)
        pages = pages.reshape(shape.slots, 1, per_row, 1)
        sides: tuple[Any, Any] = _of_layer(shape, layer, keys), _of_layer(shape, layer, values)
        counts = jnp.ones(shape.slots, jnp.int32), shape.ends
        how = {"mask_type": cudnn.MaskType.PADDING, "scale": shape.size**-0.5}
        return cudnn.paged_attention(queries, *sides, *counts, pages, pages, **how)

    return Decode(attend, (shape.slots * per_row, page, shape.kv_heads, shape.size))


# Private functions of other libraries come last, because they may end the process.
DECODES: Mapping[str, Callable[[CacheShape], Decode]] = {
    "project": project_decode,
    "all scores": functools.partial(project_decode, is_plain=True),
    "tokamax, in place": tokamax_in_place,
    "tokamax, folded": functools.partial(tokamax_decode, is_folded=True),
    "tokamax": tokamax_decode,
    "cuDNN padded": cudnn_padded,
    "cuDNN paged": cudnn_paged,
}
ON_A_CPU = ("project", "all scores")


def layers_of(decode: Decode, shape: CacheShape) -> Callable[[Any, Any, Any], Any]:
    """Return a function that attends in all layers, one after the other."""

    def run(queries: Any, keys: Any, values: Any) -> Any:
        for layer in range(shape.layers):
            queries = decode.attend(queries, keys, values, layer)
        return queries

    return run


def _decode_s(decode: Decode, shape: CacheShape, runs: int) -> float:
    """Return the seconds of one layer's attention, in a program that runs all layers."""
    import jax
    import jax.numpy as jnp

    from window.decode_steps import random_weights

    first, *rest = decode.kv_shape
    side = jax.ShapeDtypeStruct((shape.layers * first, *rest), jnp.bfloat16)
    keys, values = random_weights({"sides": [side, side]}, "bfloat16")["sides"]
    queries = jnp.ones((shape.slots, 1, shape.heads, shape.size), jnp.bfloat16)
    run = jax.jit(layers_of(decode, shape))
    return seconds_a_run(lambda: run(queries, keys, values), runs) / shape.layers


def measure_decode(setting: Setting) -> Iterator[Figure]:
    """Yield the time of a layer's decode attention by each kernel, and its rate."""
    import jax

    shapes = {
        "at least 10 to 14": CacheShape(),
        "at least 62 to 90": CacheShape(length=4096, used=4096),
    }
    if setting.is_tiny:
        shapes = {"": CacheShape(2, slots=2, heads=4, size=16, length=64, used=40)}
    for (name, build), (predicted, shape) in itertools.product(DECODES.items(), shapes.items()):
        named = f"{name}, {shape.slots} x {shape.used}"
        if name not in ON_A_CPU and jax.default_backend() != "gpu":
            yield Figure(named, math.nan, "us", predicted, NEEDS_GPU)
            continue
        try:
            seconds = _decode_s(build(shape), shape, 5 if setting.is_tiny else 30)
        except Exception as error:  # noqa: BLE001  (other libraries may raise anything)
            yield failed(named, "us", error, predicted)
        else:
            size = 4 * shape.slots * shape.used * shape.kv_heads * shape.size
            yield Figure(named, 1e6 * seconds, "us", predicted)
            yield Figure(f"{named}, rate", size / seconds / 1e9, "GB/s")


# Rows of trees.


@dataclass(frozen=True)
class RowShape:
    """Rows of equal trees. Half of a tree is a prompt, and the rest is cut into branches."""

    rows: int = 4
    length: int = 4096
    heads: int = 12
    kv_heads: int = 2
    size: int = 128
    trees: int = 1
    branches: int = 1

    def ends(self) -> Any:
        """Return the ends [B T] of the nodes: node i sees node j iff `j <= i < ends[j]`."""
        import numpy as np

        node = np.arange(self.length)
        tree = self.length // self.trees
        branch = tree // 2 // self.branches
        first = node - node % tree
        in_branch = node % tree - tree // 2
        of_branch = first + tree // 2 + (in_branch // branch + 1) * branch
        ends = np.where(in_branch < 0, first + tree, of_branch)
        return np.broadcast_to(ends, (self.rows, self.length)).astype(np.int32)


# TFLOP/s of the pairs that see each other, forward, and forward and backward.
PREDICTED = {
    ("tree of 8 branches", "Triton"): ("200", "120"),
    ("tree of 8 branches", "tokamax"): ("390", "300"),
    ("one path", "Triton"): ("250", "150"),
    ("one path", "tokamax"): ("500", "380"),
    ("16 trees of 8 branches", "Triton"): ("150", "90"),
    ("16 trees of 8 branches", "tokamax"): ("260", "25"),
}
SLOW = ("20 to 50", "20 to 50")  # of XLA alone, for one tree or path


def row_kernels() -> dict[str, Callable[..., Any]]:
    """Return attention from (queries, keys, values, ends) by each kernel, the fastest first."""
    import jax.numpy as jnp

    from lightning_jax.models.attention import attention, blockwise, flash_gpu, flash_tokamax

    def with_all_scores(queries: Any, keys: Any, values: Any, ends: Any) -> Any:
        node = jnp.arange(ends.shape[1])
        query, key = node[None, :, None], node[None, None, :]
        seen = (key <= query) & (query < ends[:, None, :])
        return attention.attend_masked(queries, keys, values, seen)

    size = {"size": attention._DEFAULT_BLOCK}
    loop = (functools.partial(pass_, **size) for pass_ in (blockwise.forward, blockwise.backward))
    return {
        "Triton": _differentiable(flash_gpu.forward, flash_gpu.backward),
        "tokamax": _differentiable(flash_tokamax.forward, flash_tokamax.backward),
        "loop of blocks": _differentiable(*loop),
        "all scores": with_all_scores,
    }


def _dtype() -> str:
    """Return bfloat16, or float32 on a CPU, where XLA may have no product for it."""
    import jax

    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def _differentiable(forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    import jax
    import jax.numpy as jnp

    def with_index(queries: Any, keys: Any, values: Any, *rest: Any) -> tuple[Any, ...]:
        index = jnp.broadcast_to(jnp.arange(queries.shape[1]), queries.shape[:2])
        ends, *results = rest
        return queries, keys, values, index, ends, None, *results

    def keep(*inputs: Any) -> Any:
        results = forward(*with_index(*inputs))
        return results[0], (*inputs, *results)

    attend = jax.custom_vjp(lambda *inputs: forward(*with_index(*inputs))[0])
    attend.defvjp(keep, lambda saved, grad: (*backward(*with_index(*saved, grad)), None))
    return attend


def _programs(attend: Callable[..., Any]) -> tuple[tuple[str, Any, int], ...]:
    """Return name, program and operations of a pair and head number, forward and with backward."""
    import jax
    import jax.numpy as jnp

    def loss(*inputs: Any) -> Any:
        return attend(*inputs).astype(jnp.float32).sum()

    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
    return ("forward", jax.jit(attend), 4), ("forward and backward", gradient, 12)


def _time_rows(
    name: str, programs: Any, shape: RowShape, repeats: int, predicted: tuple[str, str]
) -> Iterator[Figure]:
    """Yield TFLOP/s of the pairs that see each other, forward and with the backward pass."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    tokens = shape.rows, shape.length
    arrays = [
        jax.random.normal(jax.random.key(i), (*tokens, number, shape.size), _dtype())
        for i, number in enumerate((shape.heads, shape.kv_heads, shape.kv_heads))
    ]
    ends = shape.ends()
    pairs = int((ends - np.arange(shape.length)).sum())
    arrays.append(jnp.asarray(ends))
    for (what, program, flops), expected in zip(programs, predicted, strict=True):

        def run(program: Any = program) -> None:
            jax.block_until_ready(program(*arrays))

        seconds = median_s(run, repeats)
        rate = flops * pairs * shape.heads * shape.size / seconds / 1e12
        yield Figure(f"{name}, {what}", rate, "TFLOP/s", expected, f"{1e3 * seconds:.3f} ms")


def measure_rows(setting: Setting) -> Iterator[Figure]:
    """Yield the rate of attention within rows by each kernel."""
    import jax

    shape, repeats = (RowShape(), 30)
    if setting.is_tiny:
        shape, repeats = RowShape(rows=2, length=256, heads=4, size=16), 5
    masks = {
        "tree of 8 branches": dataclasses.replace(shape, branches=8),
        "one path": shape,
        "16 trees of 8 branches": dataclasses.replace(shape, trees=16, branches=8),
    }
    programs = {kernel: _programs(attend) for kernel, attend in row_kernels().items()}
    for kernel, (mask, trees) in itertools.product(programs, masks.items()):
        predicted = PREDICTED.get((mask, kernel), SLOW if trees.trees == 1 else ("", ""))
        name = f"{kernel}, {mask}"
        if kernel in ("Triton", "tokamax") and jax.default_backend() != "gpu":
            yield Figure(name, math.nan, "TFLOP/s", predicted[0], NEEDS_GPU)
            continue
        try:
            yield from _time_rows(name, programs[kernel], trees, repeats, predicted)
        except Exception as error:  # noqa: BLE001  (other libraries may raise anything)
            yield failed(name, "TFLOP/s", error, predicted[0])


def measure_differences(setting: Setting) -> Iterator[Figure]:
    """Yield the largest difference of each kernel's results from those of all scores in float32."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    shape = RowShape(rows=2, length=1000, heads=9, kv_heads=3, size=64, trees=4, branches=5)
    if setting.is_tiny:
        shape = dataclasses.replace(shape, length=160, size=16)
    random = np.random.default_rng(0)
    numbers = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    inputs = [
        jnp.asarray(random.normal(size=(shape.rows, shape.length, number, shape.size)), "bfloat16")
        for number in numbers
    ]
    inputs.append(jnp.asarray(shape.ends()))

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def results(attend: Any, dtype: str, *inputs: Any) -> Any:
        *arrays, ends = inputs
        queries, keys, values, grad = (array.astype(dtype) for array in arrays)
        out, backward = jax.vjp(lambda *sides: attend(*sides, ends), queries, keys, values)
        return out, *backward(grad)

    kernels = row_kernels()
    with jax.default_matmul_precision("highest"):
        exact = results(kernels["all scores"], "float32", *inputs)
    for name, attend in kernels.items():
        if name in ("Triton", "tokamax") and jax.default_backend() != "gpu":
            yield Figure(f"{name}: output", math.nan, "", "below 0.02", NEEDS_GPU)
            continue
        try:
            actual = results(attend, _dtype(), *inputs)
        except Exception as error:  # noqa: BLE001  (other libraries may raise anything)
            yield failed(f"{name}: output", "", error, "below 0.02")
            continue
        parts = ("output", "gradient of queries", "gradient of keys", "gradient of values")
        for part, ours, theirs in zip(parts, actual, exact, strict=True):
            error = float(jnp.abs(ours.astype(jnp.float32) - theirs).max() / jnp.abs(theirs).max())
            yield Figure(f"{name}: {part}", error, "", "below 0.02", "of the largest number")
