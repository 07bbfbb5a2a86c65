"""Bundles of microbatches, which one program processes one after another.

All bundles of a batch shape have the same size, so a program compiles once for any number of
microbatches per update. A loop on the host runs it for each bundle.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int32

from lightning_jax.models.mesh import batch_sharding, platform_of
from lightning_jax.models.sharding import put_on_mesh
from lightning_jax.rl.batches.batch import Batch
from lightning_jax.rl.config import BatchConfig
from lightning_jax.rl.gae import CallValues
from lightning_jax.types import Trajectory

# Microbatches in a bundle, padding included. On a CPU each start of a program gets fresh memory.
# Other platforms use 1, because starting a program eight times costs nothing there.
BUNDLE_ON = {"cpu": 8}
PAIR_PARTS = (4, 2, 1)  # an accelerator's rows have a quarter, half or all places for pairs


def pair_sizes(config: BatchConfig, platform: str) -> tuple[int, ...]:
    """Return the numbers of places for distinct pairs that rows may have, ascending.

    Each is a shape of its own, for which programs compile. A CPU has one, because it skips chunks
    of padding itself and its bundles need microbatches of one shape.
    """
    if platform == "cpu":
        return (config.max_targets,)
    chunk = config.largest_chunk
    num_chunks = config.max_targets // chunk
    return tuple(sorted({chunk * -(-num_chunks // part) for part in PAIR_PARTS}))


def place_batches(batches: Sequence[Batch], config: BatchConfig, mesh: Mesh) -> list[Batch]:
    """Return batches of the host on the devices of a mesh, in the least of `pair_sizes`."""
    sizes, cut = pair_sizes(config, mesh.devices.flat[0].platform), list[Batch]()
    for batch in batches:
        num_pairs = int((batch.distinct.ids >= 0).sum(axis=1).max())
        cut.append(cut_pairs(batch, next(size for size in sizes if size >= num_pairs)))
    return put_on_mesh(cut, batch_sharding(mesh))


def cut_pairs(batch: Batch, size: int) -> Batch:
    """Return a batch of the host with the first `size` places of each row for distinct pairs."""
    distinct = batch.distinct

    def cut(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf[:, :size], tree)

    masks, teacher = distinct.masks, batch.teacher
    if masks is not None:
        masks = replace(masks, of_pairs=cut(masks.of_pairs))
    if teacher is not None:  # names tokens for each pair
        teacher = replace(teacher, top=cut(teacher.top))
    pairs = replace(
        distinct,
        nodes=cut(distinct.nodes),
        ids=cut(distinct.ids),
        temperatures=cut(distinct.temperatures),
        masks=masks,
    )
    return replace(batch, distinct=pairs, teacher=teacher)


def bundles(batches: Sequence[Batch]) -> list[tuple[tuple[Batch, ...], Int32[np.ndarray, ""]]]:
    """Return the microbatches in bundles, each with its number of microbatches without padding."""
    if not batches:
        return []
    sharding = getattr(batches[0].tokens, "sharding", None)
    platform = jax.default_backend() if sharding is None else platform_of(sharding)
    size, bundles_of_size = BUNDLE_ON.get(platform, 1), []
    for start in range(0, len(batches), size):
        part = batches[start : start + size]
        padding = [part[-1]] * (size - len(part))
        bundles_of_size.append(((*part, *padding), np.asarray(len(part), np.int32)))
    return bundles_of_size


def measure(
    function: Callable[..., list[Any]], batches: Sequence[Batch], *weights: Any
) -> list[Any]:
    """Run a jitted `map_bundle` on all microbatches, possibly none, and return its results."""
    results: list[Any] = []
    for bundle, count in bundles(batches):
        results += function(bundle, count, *weights)[: int(count)]
    return results


def by_sequence(batches: Sequence[Batch], measured: Sequence[Any], number: int) -> list[Any]:
    """Return what was measured at the targets of each of `number` packed sequences, in order.

    `measured` has a tree of arrays [B, R, ...] for each batch, and the result one of arrays
    [N, ...] for a sequence with N targets. All are on the host. A sequence that no row holds has
    None.
    """
    by_index: list[Any] = [None] * number
    for batch, values in zip(batches, measured, strict=True):
        mask = np.asarray(batch.target_mask)
        indices = np.asarray(batch.target_calls)[mask]
        kept = jax.tree.map(lambda leaf, mask=mask: np.asarray(leaf)[mask], values)
        # Targets of a sequence are contiguous.
        cuts = [0, *np.flatnonzero(np.diff(indices)) + 1, len(indices)]
        for start, stop in itertools.pairwise(cuts if len(indices) else ()):
            part = slice(start, stop)
            by_index[indices[start]] = jax.tree.map(lambda leaf, part=part: leaf[part], kept)
    return by_index


def by_target(
    batches: Sequence[Batch], values: Sequence[tuple[float, ...]]
) -> list[Float[np.ndarray, "B R"]]:
    """Return each batch's array of one value per target, 0 where masked.

    `values` has one per target of each packed sequence, in order. This undoes `by_sequence`.
    """
    arrays = []
    for batch in batches:
        mask, calls = np.asarray(batch.target_mask), np.asarray(batch.target_calls)
        out = np.zeros(mask.shape, np.float32)
        # A sequence's targets are adjacent in one row, in order.
        order = list(dict.fromkeys(calls[mask].tolist()))
        out[mask] = [value for index in order for value in values[index]]
        arrays.append(out)
    return arrays


def values_by_call(
    trajectories: Sequence[Trajectory],
    batches: Sequence[Batch],
    measured: Sequence[Float[np.ndarray, "B R"]],
) -> list[tuple[CallValues, ...]]:
    """Return the values of each trajectory's calls, measured at targets of `state_sequences`."""
    number = sum(len(trajectory.transitions) for trajectory in trajectories)
    values_of = by_sequence(batches, measured, number)
    rest = iter(None if values is None else tuple(values.tolist()) for values in values_of)
    return [tuple(itertools.islice(rest, len(t.transitions))) for t in trajectories]


def fold_bundle(
    bundle: tuple[Batch, ...],
    count: Int32[Array, ""],
    body: Callable[[Any, Batch, Int32[Array, ""]], Any],
    start: Any,
) -> Any:
    """Run `body(carry, microbatch, its index)` for the first `count` microbatches in order.

    All run in one program, because on a CPU each run gets gigabytes of fresh memory, page by page.
    A bundle of one microbatch has no padding and needs no loop.
    """
    if len(bundle) == 1:
        return body(start, bundle[0], jnp.int32(0))
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *bundle)

    def one(index: Int32[Array, ""], carry: Any) -> Any:
        return body(carry, jax.tree.map(lambda leaf: leaf[index], stacked), index)

    return jax.lax.fori_loop(0, count, one, start)


def map_bundle(function: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Map `function(microbatch, *weights)` over a bundle, with zeros for its padding.

    Its result is a tree of arrays, such as the scores of the targets [B, R].
    """

    def run(bundle: tuple[Batch, ...], count: Int32[Array, ""], *weights: Any) -> list[Any]:
        def write(results: Any, batch: Batch, index: Any) -> Any:
            put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=index, axis=0)
            return jax.tree.map(put, results, function(batch, *weights))

        shapes = jax.eval_shape(lambda batch: function(batch, *weights), bundle[0])
        start = jax.tree.map(lambda leaf: jnp.zeros((len(bundle), *leaf.shape), leaf.dtype), shapes)
        results = fold_bundle(bundle, count, write, start)
        return [jax.tree.map(lambda leaf, i=i: leaf[i], results) for i in range(len(bundle))]

    return run
