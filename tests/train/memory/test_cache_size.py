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
from lightning_jax.train.memory.cache_size import (
    size_for_run,
    size_for_server,
    sized,
    with_slots,
)

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


def _slots(serve: ServeConfig, tokens: int | None, fits_slots: bool) -> tuple[int, int]:
    """Return slots and their length on a CPU whose slots may take so many tokens in all."""
    room = None if tokens is None else 8 * tokens * TOKEN_KIB * 1024 + WEIGHTS_MIB * 2**20
    fitted = with_slots(
        *(serve, MODEL, MESH, "bfloat16", lambda _: WEIGHTS_MIB * 2**20),
        None if room is None else int(room / plan.TIGHT) + 1,
        fits_slots=fits_slots,
    )
    assert fitted.prefill_buckets is not None and fitted.max_len >= fitted.prefill_buckets[-1]
    return fitted.slots, fitted.max_len


def test_a_server_has_fewer_slots_rather_than_a_shorter_context() -> None:
    free = ServeConfig()
    assert MODEL.shape.max_positions == 40_960
    assert _slots(free, 10**9, True) == (16, 32_768)
    assert _slots(free, 5 * 32_768 + 99, True) == (5, 32_768)
    assert _slots(free, 2 * 20_000, True) == (2, 19_968)  # a multiple of 256
    assert _slots(free, 1500, True) == (1, 1024)
    assert _slots(free, 0, True) == (1, 1024)  # the plan of the engine says that it does not fit
    assert _slots(free, None, True) == (16, 1024)
    assert _slots(replace(free, slots=4), 4 * 5000, False) == (4, 4864)
    assert _slots(replace(free, slots=1), 20_000, True) == (1, 19_968)
    assert _slots(replace(free, max_len=4096), 3 * 4096, True) == (3, 4096)
    assert _slots(replace(free, max_len=40_960), 10**9, True) == (16, 40_960)
    assert _slots(replace(free, slots=64, max_len=4096), 4096, False) == (64, 4096)


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
        serve = size_for_server(config, MODEL, config.serve, fits_slots=False)
    expected = ROW_MIB if gib == 1 else 4 * ROW_MIB
    assert serve.prefix_cache_mib == expected
    made = plan.make_plan(MODEL, replace(config, serve=serve), limit=limit)
    cache = next(item for item in made.items if item.name == "prefix cache")
    assert cache.num_bytes == expected * 2**20
    assert f"serve.prefix_cache_mib={expected:g}" in cache.setting


@pytest.mark.parametrize(("gib", "length"), [(1000, 32_768), (120, 32_768), (84, 20_224)])
def test_a_server_fits_its_slots_beside_weights_and_cache(
    gib: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two copies of the weights take 30.5 GiB while it loads, and slots an eighth of the rest."""
    limit = Limit(gib * 2**30, "the container", "raise memory.max")
    monkeypatch.setattr(cache_size, "process_limit", lambda: limit)
    config = replace(_config(), serve=ServeConfig())
    serve = size_for_server(config, MODEL, ServeConfig(), fits_slots=True)
    assert (serve.max_len, serve.slots) == (length, 16 if gib == 1000 else 2)


def test_samplers_on_other_devices_size_their_own() -> None:
    config = _config(cluster=ClusterConfig(address="auto", samplers=1))
    assert size_for_run(config, MODEL) == config
