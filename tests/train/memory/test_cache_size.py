"""Tests that the prefix cache is as large as the slots if that fits, and never below its least."""

from dataclasses import replace

import jax
import pytest

from lightning_jax.engine.config import LEAST_CACHE_MIB, ServeConfig
from lightning_jax.models.config import MeshConfig, ModelConfig
from lightning_jax.models.families.table import SHAPES
from lightning_jax.models.mesh import serving_mesh
from lightning_jax.models.shape import DecoderConfig
from lightning_jax.system.memory import Limit
from lightning_jax.train.config import ClusterConfig, Config
from lightning_jax.train.memory import cache_size, plan
from lightning_jax.train.memory.cache_size import size_for_run, size_for_server, sized

MODEL = DecoderConfig(SHAPES["Qwen/Qwen3-8B"])
MESH = serving_mesh(None, MeshConfig(fsdp=1), jax.devices()[:1])
SERVE = ServeConfig(slots=4, max_len=4096)
TOKEN_KIB = 2 * 36 * 8 * 128 * 2 // 1024  # keys and values of 36 layers with 8 heads in bfloat16
ROW_MIB = TOKEN_KIB * 4096 / 1024
WEIGHTS_MIB = 1000


def _mib(serve: ServeConfig, capacity_mib: float | None) -> float | None:
    """Return the size of the cache on a device with so much memory, of which weights take some."""

    def total(serve: ServeConfig) -> int:
        return int((WEIGHTS_MIB + (serve.prefix_cache_mib or 0)) * 2**20)

    capacity = None if capacity_mib is None else int(capacity_mib * 2**20 / plan.TIGHT)
    return sized(serve, MODEL, MESH, "bfloat16", total, capacity).prefix_cache_mib


def test_the_cache_takes_half_of_what_is_left_up_to_the_slots() -> None:
    assert ROW_MIB == 576
    slots = 4 * ROW_MIB
    left = WEIGHTS_MIB + ROW_MIB  # at the least size, which is one row
    assert _mib(SERVE, left + 2 * slots) == slots
    assert _mib(SERVE, left + 1000) == pytest.approx(ROW_MIB + 500, abs=3)  # whole pages
    for capacity in (left, left - 500, None):  # None: unknown
        assert _mib(SERVE, capacity) == ROW_MIB
    short = replace(SERVE, max_len=512)
    assert _mib(short, WEIGHTS_MIB) == pytest.approx(LEAST_CACHE_MIB, abs=3)
    assert _mib(short, 10**6) == 288 == 4 * ROW_MIB / 8
    for mib in (0.0, 5000.0):  # as set
        assert _mib(replace(SERVE, prefix_cache_mib=mib), 10**6) == mib


def _config(**changes: object) -> Config:
    config = Config(model=ModelConfig(dtype="bfloat16"), serve=SERVE, num_steps=0)
    return replace(config, mesh=MeshConfig(data=1, fsdp=1, tensor=1), **changes)


@pytest.mark.parametrize("gib", [1, 1000])
@pytest.mark.parametrize("size", [size_for_run, size_for_server])
def test_the_plan_has_room_for_the_cache(
    size: object, gib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = Limit(gib * 2**30 * jax.local_device_count(), "the container", "raise memory.max")
    monkeypatch.setattr(cache_size, "process_limit", lambda: limit)
    config = _config()
    if size is size_for_run:
        serve = size_for_run(config, MODEL).serve
    else:
        serve = size_for_server(config, MODEL)
    expected = ROW_MIB if gib == 1 else 4 * ROW_MIB
    assert serve.prefix_cache_mib == expected
    made = plan.make_plan(MODEL, replace(config, serve=serve), limit=limit)
    cache = next(item for item in made.items if item.name == "prefix cache")
    assert cache.num_bytes == expected * 2**20
    assert f"serve.prefix_cache_mib={expected:g}" in cache.setting


def test_samplers_on_other_devices_size_their_own() -> None:
    config = _config(cluster=ClusterConfig(address="auto", samplers=1))
    assert size_for_run(config, MODEL) == config
