"""Size of the prefix cache where the settings leave it open: as much as the slots, if it fits."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax.numpy as jnp
from jax.sharding import Mesh

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.device.pages import fewest_pages, page_bytes
from lightning_jax.engine.device.radix import PAGE
from lightning_jax.models.mesh import platform_of, serving_mesh
from lightning_jax.models.shape import DecoderConfig
from lightning_jax.models.sharding import cache_sharding
from lightning_jax.train.config import Config
from lightning_jax.train.memory.host import process_items
from lightning_jax.train.memory.items import serving_items
from lightning_jax.train.memory.plan import TIGHT, device_capacity, make_plan, process_limit

SHARE = 0.5  # of the memory that is left


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


def size_for_server(config: Config, model: DecoderConfig) -> ServeConfig:
    """Return the settings of a server without a run, with the cache's size.

    The loaded weights are freed only after the engine has its own copy.
    """
    mesh = serving_mesh(config.serve.mesh, config.mesh)
    here, capacity = [], device_capacity()
    if (limit := process_limit()) is not None:
        here, capacity = process_items(model, config), limit.num_bytes // mesh.size

    def total(serve: ServeConfig) -> int:
        items = serving_items(model, replace(config, serve=serve), mesh, shares_base=False)
        return sum(item.num_bytes for item in (*items, items[0], *here))

    return sized(config.serve, model, mesh, config.model.dtype, total, capacity)


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
