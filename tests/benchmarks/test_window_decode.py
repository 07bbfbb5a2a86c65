"""Tests of the decode measurements and their prototypes on a CPU."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_bench import Slots
from window.cases import Case, Setting
from window.decode import CASES, VARIANTS, update_times_us
from window.prototype import (
    STEPS,
    bytes_per_step,
    init_merged_state,
    make_workload,
    merge_weights,
    merged_step,
)

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.engine.device.table import SlotTable, unpack_sampled
from lightning_jax.engine.types import SamplingParams
from lightning_jax.models.formats.find import tiny_shape
from lightning_jax.models.shape import DecoderConfig
from lightning_jax.models.transformer import init_params

SLOTS = 3
FIELDS = ("tokens", "behavior_logprobs", "sampling_logprobs", "tempered_logprobs")
TINY = DecoderConfig(tiny_shape())
QWEN3 = TINY.with_shape(qk_norm=True, tie_embeddings=False)
IN_CHILD_PROCESSES = ("graph_updates", "skip_temp_135m_64")


@pytest.mark.parametrize(
    "config",
    [TINY, TINY.with_shape(qkv_bias=True), QWEN3],
    ids=["llama", "qwen2", "qwen3"],
)
def test_merged_step_samples_the_engines_tokens(config: DecoderConfig) -> None:
    params = init_params(config, jax.random.key(3))
    if config.shape.qkv_bias:
        for i in range(config.shape.num_layers):
            params[f"layers_{i}"]["q"]["bias"] += 0.3
    engine = SlotPrograms(config, ServeConfig(slots=SLOTS, max_len=32, prefill_buckets=(16,)))
    slots, table = Slots(engine, engine.put_on_mesh(params)), SlotTable(SLOTS)
    weights = merge_weights(params, config)
    merged = init_merged_state(config, SLOTS, 32, jnp.float32, "cpu")
    step = jax.jit(merged_step, static_argnames="config", donate_argnums=1)
    admissions = {0: [(0, 0, 1.0), (1, 2, 0.0)], 4: [(2, 1, 0.6)]}  # slot, position, temperature
    for number in range(8):
        for slot, position, heat in admissions.get(number, []):
            sampling = SamplingParams(temperature=heat)
            slots.activate(slot, [*range(position), 11 + slot], sampling, 40 + slot)
            table.begin(slot, 11 + slot, position, sampling, 40 + slot)
        expected, active = slots.step(), slots.running
        merged, result = step(weights, merged, table.next_steps(active), config=config)
        found = unpack_sampled(np.asarray(result))
        np.testing.assert_array_equal(found.tokens[active], expected.tokens[active])
        for field in FIELDS[1:]:
            ours, theirs = getattr(found, field), getattr(expected, field)
            np.testing.assert_allclose(ours[active], theirs[active], atol=1e-4)


def test_merged_step_has_twelve_arrays() -> None:
    config = TINY
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    weights = jax.eval_shape(lambda params: merge_weights(params, config), params)
    state = init_merged_state(config, SLOTS, 32, jnp.float32, "cpu")
    assert len(jax.tree.leaves((weights, state))) + 1 == 12


def test_bytes_of_a_step_are_weights_and_used_cache() -> None:
    load = make_workload("8b", 64, is_tiny=False)
    assert bytes_per_step(load) / 3.0e9 == pytest.approx(7.06, rel=0.02)  # ms at 3.0 TB/s
    assert load.first_position + 2 * load.repeats + 5 <= load.max_len


def test_update_times_are_read_from_the_log() -> None:
    log = """I1 command_buffer_thunk.cc:9] Updated command buffer in 35 μs; num_commands=428
I1 command_buffer_thunk.cc:9] Execute command buffer on device #0; num_executions=2
I1 command_buffer_thunk.cc:9] Updated command buffer in 7 us
I1 command_buffer_thunk.cc:9] 0 updated command buffer in 0.00012 sec; num_commands=3"""
    assert update_times_us(log) == pytest.approx([35.0, 7.0, 120.0])


def test_names_of_cases_and_steps() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert tuple(STEPS) == VARIANTS


def _figures_or_notes(case: Case, path: Path) -> None:
    setting = Setting(out=path, work=path, seconds=60.0, is_tiny=True)
    figures = list(case.run(setting))
    assert figures
    for figure in figures:
        assert figure.unit
        assert math.isfinite(figure.value) or figure.note


def _is_quick(case: Case) -> bool:
    """Return whether a case neither repeats another's tiny shape nor starts processes."""
    same = case.name.endswith(("_1.5b_64", "_8b_64", "_135m_128"))
    return not same and case.name not in IN_CHILD_PROCESSES


@pytest.mark.parametrize("case", [c for c in CASES if _is_quick(c)], ids=lambda c: c.name)
def test_tiny_case_yields_finite_figures_or_notes(case: Case, tmp_path: Path) -> None:
    _figures_or_notes(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in CASES if not _is_quick(c)], ids=lambda c: c.name)
def test_other_tiny_case_yields_finite_figures_or_notes(case: Case, tmp_path: Path) -> None:
    _figures_or_notes(case, tmp_path)
