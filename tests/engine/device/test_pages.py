"""Tests of copies between rows and pages: the right tokens, nothing else, and in place."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.device import pages as pages_module
from lightning_jax.engine.device.pages import (
    MAX_POOL_SIZE,
    MIN_MOVES,
    Move,
    PageCopier,
    fewest_pages,
    page_bytes,
)
from lightning_jax.engine.device.radix import PAGE
from lightning_jax.models.attention.kv_cache import KVCache, init_cache, row_length
from lightning_jax.models.config import MeshConfig
from lightning_jax.models.mesh import make_mesh
from lightning_jax.models.sharding import cache_sharding
from lightning_jax.testing.tiny import tiny_model

SHAPE = tiny_model(0).config.shape
SERVE = ServeConfig(slots=3, max_len=100)  # six whole pages and four tokens


@pytest.fixture(params=["cpu", "gpu", "tpu"])
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Select the platform whose cache layout and copies are tested, always on a CPU."""
    monkeypatch.setattr(pages_module, "platform_of", lambda _: request.param)
    return request.param


def copier(serve: ServeConfig = SERVE, sharding: Any = None) -> PageCopier:
    sharding = sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return PageCopier(SHAPE, serve, jnp.dtype("float32"), sharding)


def moves(slot: int, first: int, pages: Sequence[int]) -> list[Move]:
    """Return the moves between these pages and the row's blocks from `first` on."""
    return [Move(page, slot, block) for block, page in enumerate(pages, first)]


def numbers(slots: int, length: int, sharding: Any, platform: str = "cpu") -> KVCache:
    """Return a cache in which every number is different."""
    zeros = init_cache(SHAPE, slots, length, platform=platform)
    return jax.device_put(
        jax.tree.map(lambda leaf: leaf + np.arange(leaf.size).reshape(leaf.shape), zeros), sharding
    )


def token_rows(cache: KVCache) -> np.ndarray:
    """Return keys and values of layer 1 as [S, C, 2 * K * D], with a token's numbers together."""
    layer = cache.layers[1 // cache.stacked]
    keys = np.moveaxis(np.concatenate(layer.keys, axis=layer.key_axis), layer.key_axis, 1)
    values = np.concatenate(layer.values, axis=2).transpose(0, 2, 1, 3)
    rows = np.concatenate([x.reshape(*x.shape[:2], -1) for x in (keys, values)], axis=2)
    return rows[-cache.num_rows :]


def devices(kind: str) -> Any:
    if kind == "one":
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return cache_sharding(SHAPE, make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)))


@pytest.mark.parametrize("kind", ["one", "eight"])
def test_blocks_go_to_pages_and_back_to_another_row(kind: str, platform: str):
    pages = copier(sharding=devices(kind))
    length = row_length(100, platform)
    cache, pool = numbers(3, length, devices(kind), platform), pages.init_pool()
    before = token_rows(cache)
    pool = pages.store(pool, cache, moves(1, 2, (7, 2, 9)))
    stored = token_rows(pool)
    for page, block in ((7, 2), (2, 3), (9, 4)):
        np.testing.assert_array_equal(
            stored[page], before[1, block * PAGE :][:PAGE], err_msg=str(page)
        )
    assert np.count_nonzero(stored.any(axis=(1, 2))) == 3
    assert pool.layers[0].keys[0].sharding.is_equivalent_to(cache.layers[0].keys[0].sharding, 4)

    both = [*moves(0, 0, (9, 7)), *moves(2, 0, (2,))]
    cache = pages.restore(cache, pool, both)
    after, expected = token_rows(cache), before.copy()
    expected[0, :PAGE], expected[0, PAGE : 2 * PAGE] = stored[9], stored[7]
    expected[2, :PAGE] = stored[2]
    np.testing.assert_array_equal(after, expected)


@pytest.mark.parametrize("max_len", [257, 520])  # a last segment of less than a page
def test_a_row_may_have_any_length(max_len: int):
    pages = copier(ServeConfig(slots=2, max_len=max_len))
    cache, pool = numbers(2, row_length(max_len, "cpu"), devices("one"), "cpu"), pages.init_pool()
    before = token_rows(cache)
    pool = pages.store(pool, cache, moves(1, 14, (3, 1)))
    np.testing.assert_array_equal(token_rows(pool)[3], before[1, 14 * PAGE :][:PAGE])
    after = token_rows(pages.restore(cache, pool, moves(0, 0, (3, 1))))
    np.testing.assert_array_equal(after[0, : 2 * PAGE], before[1, 14 * PAGE : 16 * PAGE])


def test_pages_on_both_sides_of_a_border_between_segments(platform: str):
    pages = copier(ServeConfig(slots=2, max_len=600))
    length = row_length(600, platform)
    cache, pool = numbers(2, length, devices("one"), platform), pages.init_pool()
    before = token_rows(cache)
    pool = pages.store(pool, cache, moves(1, 14, (3, 1, 4, 0)))  # blocks 14 to 17; 16 begins at 256
    for page, block in ((3, 14), (1, 15), (4, 16), (0, 17)):
        np.testing.assert_array_equal(token_rows(pool)[page], before[1, block * PAGE :][:PAGE])
    ids = (*range(3, 18), 0, 1, 3)  # 18 pages: two in the second segment
    after = token_rows(pages.restore(cache, pool, moves(0, 0, ids)))
    stored = token_rows(pool)
    for block, page in enumerate(ids):
        np.testing.assert_array_equal(after[0, block * PAGE :][:PAGE], stored[page])
    np.testing.assert_array_equal(after[0, 18 * PAGE :], before[0, 18 * PAGE :])
    np.testing.assert_array_equal(after[1], before[1])


def test_a_copy_moves_pages_and_never_the_pool():
    pages = copier(ServeConfig(slots=16, max_len=1024))
    pool, cache = pages.init_pool(), init_cache(SHAPE, 16, 1024)
    programs = {
        "store": pages._store.lower(pool, cache, pages.no_moves()),
        "restore": pages._restore.lower(cache, pool, pages.no_moves()),
    }
    for name, kept in (("store", pool), ("restore", cache)):
        memory = programs[name].compile().memory_analysis()
        assert memory is not None
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(kept))
        assert memory.alias_size_in_bytes == size, name
        assert memory.temp_size_in_bytes < size / 100, name


def test_the_pool_is_as_large_as_asked_but_not_larger_than_it_can_be_used():
    mib = 5.5 * page_bytes(SHAPE, jnp.dtype("float32")) / 2**20
    assert copier(ServeConfig(slots=3, max_len=100, prefix_cache_mib=mib)).num_pages == 5
    assert copier().num_pages == MAX_POOL_SIZE * 3 * 6
    head_dim, dtype = SHAPE.blocks[0].mixer.head_dim, jnp.dtype("float32")
    assert page_bytes(SHAPE, dtype, "tpu") == 128 // head_dim * page_bytes(SHAPE, dtype)
    # By default there is room for 256 MiB, or for the longest conversation.
    size = 2**20
    assert fewest_pages(ServeConfig(slots=8, max_len=2048), size) == 256
    assert fewest_pages(ServeConfig(slots=8, max_len=16 * 500), size) == 500
    assert fewest_pages(ServeConfig(slots=1, max_len=160), size) == 80
    off = copier(ServeConfig(max_len=1024, prefix_cache_mib=0.0))
    cache, pool = off.warmup(init_cache(SHAPE, 1, 16), off.init_pool())
    assert off.num_pages == 0
    assert [held.layers[0].keys[0].shape[0] for held in (pool, cache)] == [0, 1]


def test_warming_up_changes_nothing_and_compiles_all():
    pages = copier()
    cache, pool = pages.warmup(numbers(3, 100, devices("one")), pages.init_pool())
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(pool))
    jax.tree.map(np.testing.assert_array_equal, cache, numbers(3, 100, devices("one")))
    compiles = pages.compiles
    pool = pages.store(pool, numbers(3, 100, devices("one")), moves(0, 4, (1, 2)))
    pages.restore(cache, pool, moves(2, 0, (1,)))
    assert pages.compiles == compiles


def test_a_block_beyond_the_row_is_an_error():
    pages = copier()
    cache = numbers(3, 100, devices("one"))
    pages.store(pages.init_pool(), cache, moves(0, 4, (1, 2)))
    with pytest.raises(AssertionError):
        pages.store(pages.init_pool(), cache, moves(0, 5, (1, 2)))


def test_more_moves_than_one_copy_takes_are_all_made(platform: str):
    pages = copier(ServeConfig(slots=2, max_len=600))
    length = row_length(600, platform)
    cache, pool = numbers(2, length, devices("one"), platform), pages.init_pool()
    before = token_rows(cache)
    everything = [*moves(0, 0, range(37)), *moves(1, 0, range(40, 77))]
    assert len(pages.no_moves()) == MIN_MOVES < len(everything)
    pool = pages.store(pool, cache, everything)
    for page, slot, block in everything:
        np.testing.assert_array_equal(token_rows(pool)[page], before[slot, block * PAGE :][:PAGE])
    swapped = [Move(page, 1 - slot, block) for page, slot, block in everything]
    after = token_rows(pages.restore(cache, pool, swapped))
    np.testing.assert_array_equal(after[::-1, : 37 * PAGE], before[:, : 37 * PAGE])
