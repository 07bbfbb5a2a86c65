"""Tests of what a run on CPUs holds beside its arrays, and of what its process may hold."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from coded import raises_coded
from log_events import records

from lightning_jax.engine.config import ServeConfig
from lightning_jax.models.config import MeshConfig, ModelConfig
from lightning_jax.models.mesh import serving_mesh
from lightning_jax.rl.config import AlgorithmConfig, BatchConfig
from lightning_jax.settings import ConfigError
from lightning_jax.system.memory import Limit
from lightning_jax.testing.tiny import tiny_model
from lightning_jax.train.config import Config, WarmupConfig
from lightning_jax.train.memory import host, plan
from lightning_jax.train.memory.items import state_items

MODEL = tiny_model(num_layers=1)
CONFIG = Config(
    serve=ServeConfig(slots=2, max_len=64, prefill_buckets=(32,), prefix_cache_mib=0.0),
    batch=BatchConfig(rows=8, row_len=64, max_targets=8, head_chunk=4),
    mesh=MeshConfig(fsdp=1),
)


def item_sizes(made: plan.Plan) -> dict[str, int]:
    return {item.name: item.num_bytes for item in made.items}


def test_on_cpus_the_process_is_part_of_the_plan() -> None:
    limit = Limit(8 * plan.GIB, "the container", "raise memory.max")
    arrays = plan.make_plan(MODEL.config, CONFIG)
    made = plan.make_plan(MODEL.config, CONFIG, limit=limit)
    found = item_sizes(made)
    assert made.capacity == plan.GIB  # each of 8 devices has a share
    assert found["Python, JAX and libraries"] == host.PROCESS // 8
    # Prefill of one length, a step of 1 or 2 slots, gradients and their application.
    assert found["5 compiled programs"] == 5 * host.PROGRAM_LAYER // 8
    assert made.total - arrays.total >= (host.PROCESS + 5 * host.PROGRAM_LAYER) // 8
    warm = WarmupConfig(num_steps=1, demonstrations="f:g")
    warmed = plan.make_plan(MODEL.config, dataclasses.replace(CONFIG, warmup=warm), limit=limit)
    found = item_sizes(warmed)
    assert found["7 compiled programs"] == 7 * host.PROGRAM_LAYER // 8
    assert found["compilation of an update"] == host.COMPILER_LAYER // 8


def test_a_float32_engine_on_one_cpu_transposes_new_weights() -> None:
    def transposed(model: ModelConfig, devices: int) -> int:
        mesh = MeshConfig(data=1, fsdp=1, tensor=devices, first_device=0)
        dtype = jnp.dtype(model.dtype)
        return host.transposed_item(MODEL.config, dtype, serving_mesh(mesh, mesh)).num_bytes

    assert transposed(ModelConfig(), 1) == 4 * sum(x.size for x in jax.tree.leaves(MODEL.params))
    assert transposed(ModelConfig(), 2) == 0
    assert transposed(ModelConfig(dtype="bfloat16"), 1) == 0


def test_a_checkpoint_copies_weights_and_moments() -> None:
    config = dataclasses.replace(CONFIG, algorithm=AlgorithmConfig(kl_coef=0.1))
    mesh = plan.make_mesh(config.mesh)
    items = state_items(MODEL.config, config, mesh, shares_base=False)
    written = [item.num_bytes for item in items if item.name != "reference policy"]
    assert host.checkpoint_item(items).num_bytes == sum(written) < sum(i.num_bytes for i in items)


def test_a_plan_above_what_the_process_may_hold_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = plan.with_remat(CONFIG, "full")
    size = plan.make_plan(MODEL.config, config, limit=Limit(plan.GIB, "", "")).total

    def check(share: float) -> None:
        limit = Limit(int(8 * size / share), "the container", "raise memory.max")
        plan.check_plan(plan.make_plan(MODEL.config, config, limit=limit))

    check(0.89)
    assert not records(caplog, "memory_tight")
    check(0.95)
    (warned,) = records(caplog, "memory_tight")
    assert warned.needed == size and warned.allowed == pytest.approx(size / 0.95, rel=1e-3)
    with raises_coded(ConfigError, "too_large") as caught:
        check(1.05)
    assert "the container" in str(caught.value) and "raise memory.max" in str(caught.value)
