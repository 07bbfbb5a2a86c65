"""Bundles: the microbatches of an update in one program, which takes them one after the other."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from lightning_jax.types import Batch

BUNDLE = 8  # a program takes a multiple of this many microbatches, some of which may be padding


def bundle(batches: Sequence[Batch]) -> tuple[tuple[Batch, ...], Int32[np.ndarray, ""]]:
    """(microbatches in a number that few programs are compiled for, how many of them count)."""
    padding = [batches[-1]] * (-len(batches) % BUNDLE)
    return (*batches, *padding), np.asarray(len(batches), np.int32)


def measure(
    function: Callable[..., list[Float[Array, "B R"]]], batches: Sequence[Batch], *weights: Any
) -> list[Float[Array, "B R"]]:
    """What a jitted `of_each` makes of each microbatch; there may be none."""
    if not batches:
        return []
    return function(*bundle(batches), *weights)[: len(batches)]


def for_each(
    bundle: tuple[Batch, ...],
    count: Int32[Array, ""],
    body: Callable[[Any, Batch, Int32[Array, ""]], Any],
    start: Any,
) -> Any:
    """`body(carry, microbatch, its index)` for the first `count` microbatches, one after the other.

    One program for all: on a CPU each run gets gigabytes of fresh memory, page by page.
    """
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *bundle)

    def one(index: Int32[Array, ""], carry: Any) -> Any:
        return body(carry, jax.tree.map(lambda leaf: leaf[index], stacked), index)

    return jax.lax.fori_loop(0, count, one, start)


def of_each(function: Callable[..., Float[Array, "B R"]]) -> Callable[..., list[Any]]:
    """`function(microbatch, *weights)` over a bundle; zeros for its padding."""

    def run(bundle: tuple[Batch, ...], count: Int32[Array, ""], *weights: Any) -> list[Any]:
        def write(found: Any, batch: Batch, index: Any) -> Any:
            new = function(batch, *weights)
            return jax.lax.dynamic_update_index_in_dim(found, new, index, axis=0)

        shape = (len(bundle), *bundle[0].target_ids.shape)
        return list(for_each(bundle, count, write, jnp.zeros(shape, jnp.float32)))

    return run
