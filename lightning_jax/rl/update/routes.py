"""Routing of a model with experts: its balance, and how much of it differs from sampling's.

The trainer reads a forest at once. Sampling prefills a prompt into the cache and decodes one token
after another. Rounding differs, so a router may choose other experts where two are nearly equal.
One path of the forest is read both ways.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from lightning_jax.models.attention.kv_cache import init_cache
from lightning_jax.models.shape import DecoderConfig, Experts
from lightning_jax.models.transformer import Gather, Params, Routes, forward_routes
from lightning_jax.rl.batches.batch import Batch
from lightning_jax.rl.update.flops import used_nodes
from lightning_jax.types import Metrics

FLIPS, LOAD, ENTROPY = "train/route_flips", "train/expert_load_max", "train/router_entropy"
NUM_DECODED = 16  # tokens of the path that are decoded one by one in each step of a run


def num_experts(config: DecoderConfig) -> int:
    """Return the largest number of experts of a layer, 0 for a model without experts."""
    mlps = (block.mlp for block in config.shape.blocks)
    return max(mlp.number if isinstance(mlp, Experts) else 0 for mlp in mlps)


def deepest_path(batch: Batch) -> Int[np.ndarray, " P"]:
    """Return the nodes from a root to the deepest node of the first row of a host's batch."""
    positions, ends = np.asarray(batch.positions[0]), np.asarray(batch.ends[0])
    last, index = int(positions.argmax()), np.arange(len(positions))
    return index[(index <= last) & (last < ends)]


@dataclass(frozen=True)
class RouteProbe:
    """Programs that measure the routing of one microbatch, each compiled once per batch shape."""

    config: DecoderConfig
    read: Callable[..., Routes]
    replay: Callable[..., Routes]

    def measure(self, params: Params, batch: Batch, on_host: Batch) -> Metrics:
        """Return the metrics of a placed microbatch, of which `on_host` is the host's copy."""
        length = on_host.positions.shape[1]
        routes = self.read(params, batch)
        path = deepest_path(on_host)
        tokens = np.zeros(length, np.int32)
        tokens[: len(path)] = on_host.tokens[0][path]
        adapter = None if on_host.adapters is None else on_host.adapters[:1]
        again = self.replay(params, tokens, np.int32(len(path)), adapter)
        ids, entropy, replayed = jax.device_get((routes.ids, routes.entropy, again.ids))
        metrics = balance(ids, entropy, used_nodes(on_host), num_experts(self.config))
        return metrics | {FLIPS: flips(ids[:, 0, path], replayed[:, : len(path)])}


def make_probe(
    config: DecoderConfig,
    platform: str,
    *,
    compute_dtype: Any,
    gather: Gather | None = None,
    num_decoded: int = NUM_DECODED,
) -> RouteProbe:
    """Build the programs of a model with experts for devices of this platform.

    The last `num_decoded` tokens of the path are decoded one by one. The others are prefilled.
    """
    cast = partial(_cast, dtype=compute_dtype)
    replay = partial(_replay, config, gather, platform, num_decoded)
    return RouteProbe(
        config,
        jax.jit(lambda params, batch: _read(cast(params), config, batch, gather)),
        jax.jit(lambda params, *path: replay(cast(params), *path)),
    )


def _cast(params: Params, dtype: Any) -> Params:
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def _read(params: Params, config: DecoderConfig, batch: Batch, gather: Gather | None) -> Routes:
    places = batch.tokens, batch.positions
    return forward_routes(
        params, config, *places, ends=batch.ends, gather=gather, adapters=batch.adapters
    )[0]


def _replay(
    config: DecoderConfig,
    gather: Gather | None,
    platform: str,
    num_decoded: int,
    params: Params,
    tokens: Int[Array, " R"],
    number: Int[Array, ""],
    adapter: Int[Array, " 1"] | None,
) -> Routes:
    """Return the routes of the first `number` tokens, read as sampling does."""
    length = len(tokens)
    dtype = params["embed"]["embedding"].dtype
    cache = init_cache(config.shape, 1, length, dtype, platform)
    first = jnp.maximum(number - num_decoded, 0)
    index = jnp.arange(length)
    places = jnp.where(index < first, index, length)[None]  # the end of the cache marks padding
    run = partial(forward_routes, params, config, gather=gather, adapters=adapter)
    filled, cache = run(tokens[None], places, cache=cache)

    def decode(carry: Any, step: Any) -> tuple[Any, Any]:
        place = first + step
        is_inside = place < number
        token = jnp.where(is_inside, tokens[jnp.minimum(place, length - 1)], 0)
        place = jnp.where(is_inside, place, length)
        routes, carry = run(token[None, None], place[None, None], cache=carry)
        return carry, (routes, place)

    _, (decoded, at) = jax.lax.scan(decode, cache, jnp.arange(num_decoded))

    def join(whole: Any, steps: Any) -> Any:  # [L 1 R ...], [S L 1 1 ...]
        rows = jnp.moveaxis(steps[:, :, 0, 0], 0, 1)
        return whole[:, 0].at[:, at].set(rows, mode="drop")

    return jax.tree.map(join, filled, decoded)


def flips(ids: Int[np.ndarray, "L P k"], others: Int[np.ndarray, "L P k"]) -> float:
    """Return in how many layers a token's experts differ, on average."""
    is_same = (np.sort(ids, axis=-1) == np.sort(others, axis=-1)).all(axis=-1)
    return float((~is_same).sum(axis=0).mean())


def balance(
    ids: Int[np.ndarray, "L B T k"],
    entropy: Float[np.ndarray, "L B T"],
    is_used: Bool[np.ndarray, "B T"],
    number: int,
) -> Metrics:
    """Return the largest load of an expert by the mean load, and the routers' mean entropy."""
    loads = [np.bincount(layer[is_used].reshape(-1), minlength=number) for layer in ids]
    load = max(float(counts.max() / counts.mean()) for counts in loads)
    return {LOAD: load, ENTROPY: float(entropy[:, is_used].mean())}
