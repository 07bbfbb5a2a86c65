"""Sizes of the slots and the prefix cache where the settings leave them open.

The cache takes as much as the slots, if it fits.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax.numpy as jnp
from jax.sharding import Mesh

from lightning_jax.engine.config import LONGEST, MAX_LEN, ServeConfig
from lightning_jax.engine.device.pages import fewest_pages, page_bytes
from lightning_jax.engine.device.radix import PAGE
from lightning_jax.models.attention.kv_cache import is_whole
from lightning_jax.models.memory import cache_bytes
from lightning_jax.models.mesh import platform_of, serving_mesh
from lightning_jax.models.shape import DecoderConfig
from lightning_jax.models.sharding import cache_sharding
from lightning_jax.rl.config import BatchConfig
from lightning_jax.train.config import Config
from lightning_jax.train.memory.host import process_items
from lightning_jax.train.memory.items import serving_items
from lightning_jax.train.memory.plan import TIGHT, device_capacity, make_plan, process_limit

SHARE = 0.5  # of the memory that is left
FEWEST = 2  # slots, so that an agent's side calls do not wait for its main one
STEP = 256  # tokens


def size_for_run(config: Config, model: DecoderConfig) -> Config:
    """Return the settings of a run on the devices here, with the cache's size.

    The samplers of a cluster are on other devices, of which nothing is known.
    """
    if config.cluster.samplers:
        return config
    plan = partial(make_plan, model, capacity=device_capacity(), limit=process_limit())

    def total(serve: ServeConfig) -> int:
        return plan(config=replace(config, serve=serve)).total

    mesh, capacity = serving_mesh(config.serve.mesh, config.mesh), plan(config=config).capacity
    serve = sized(config.serve, model, mesh, config.model.dtype, total, capacity)
    return replace(config, serve=serve)


def size_for_server(
    config: Config, model: DecoderConfig, serve: ServeConfig, *, fits_slots: bool
) -> ServeConfig:
    """Return the settings of a server without a run, with its slots and the cache's size.

    The loaded weights are freed only after the engine has its own copy. `serve` has the settings as
    given, in place of those of `config`. See `with_slots`.
    """
    mesh, limit = serving_mesh(config.serve.mesh, config.mesh), process_limit()
    capacity = device_capacity() if limit is None else limit.num_bytes // mesh.size

    def total(serve: ServeConfig) -> int:
        served = replace(config, serve=serve, batch=BatchConfig())  # its rows follow
        items = serving_items(model, served, mesh, shares_base=False)
        here = [] if limit is None else process_items(model, served)
        return sum(item.num_bytes for item in (*items, items[0], *here))

    dtype = config.model.dtype
    serve = with_slots(serve, model, mesh, dtype, total, capacity, fits_slots=fits_slots)
    return sized(serve, model, mesh, dtype, total, capacity)


def with_slots(
    serve: ServeConfig,
    model: DecoderConfig,
    mesh: Mesh,
    dtype: str,
    total: Callable[[ServeConfig], int],
    capacity: int | None,
    *,
    fits_slots: bool,
) -> ServeConfig:
    """Return the settings with `max_len`, which is the model's positions if they fit.

    With `fits_slots` there are fewer slots rather than a shorter context, down to `FEWEST`. The
    slots take an eighth of the memory that is left on a CPU, where other programs need some and a
    batch of four decodes almost as fast as one of 16. They take half of an accelerator's. `total`
    and `capacity` are those of `sized`.
    """
    longest = serve.max_len or min(model.shape.max_positions, LONGEST)
    if capacity is None or (serve.max_len and not fits_slots):
        return serve.with_sizes(longest)
    sharding = cache_sharding(model.shape, mesh)
    token = cache_bytes(model, 1, PAGE, sharding, jnp.dtype(dtype)) // PAGE
    least = replace(serve.with_sizes(), slots=1, max_len=min(longest, MAX_LEN))
    share = SHARE if is_whole(platform_of(sharding)) else SHARE / 4
    room = int(share * (TIGHT * capacity - total(replace(least, prefix_cache_mib=0.0)))) // token
    fewest = min(FEWEST, serve.slots) if fits_slots else serve.slots
    length = serve.max_len or max(min(longest, room // fewest // STEP * STEP), least.max_len)
    slots = max(min(room // length, serve.slots), 1) if fits_slots else serve.slots
    return replace(serve, slots=slots, max_len=length).with_sizes()


def sized(
    serve: ServeConfig,
    model: DecoderConfig,
    mesh: Mesh,
    dtype: str,
    total: Callable[[ServeConfig], int],
    capacity: int | None,
) -> ServeConfig:
    """Return the settings with the size of the prefix cache, unless they have one.

    `total` returns the bytes that a device holds with such settings, and `capacity` how many it
    may. If that is unknown, the cache has its least size.
    """
    if serve.prefix_cache_mib is not None:
        return serve
    platform = platform_of(cache_sharding(model.shape, mesh))
    size = page_bytes(model.shape, jnp.dtype(dtype), platform)

    def with_pages(number: int) -> ServeConfig:
        return replace(serve, prefix_cache_mib=float(math.ceil(number * size / 2**20)))

    least, most = fewest_pages(serve, size), serve.slots * (serve.max_len // PAGE)
    if most <= least or capacity is None:
        return with_pages(least)
    smallest, largest = total(with_pages(least)), total(with_pages(most))
    spare = SHARE * (TIGHT * capacity - smallest)
    share = min(max(spare / max(largest - smallest, 1), 0.0), 1.0)
    return with_pages(least + int(share * (most - least)))
