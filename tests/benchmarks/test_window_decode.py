"""Tests of the decode measurements and their prototypes on a CPU."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from window.cases import Case, Setting
from window.decode import CASES, VARIANTS, update_times_us
from window.prototype import (
    STEPS,
    Column,
    bytes_per_step,
    init_merged_state,
    make_workload,
    merge_weights,
    merged_step,
    unpack_result,
)

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.device.programs import start_of
from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.engine.types import SamplingParams
from lightning_jax.models.formats.find import tiny_shape
from lightning_jax.models.shape import DecoderConfig
from lightning_jax.models.transformer import init_params

SLOTS = 3
FIELDS = ("tokens", "behavior_logprobs", "sampling_logprobs", "tempered_logprobs")
TINY = DecoderConfig(tiny_shape())
QWEN3 = TINY.with_shape(qk_norm=True, tie_embeddings=False)
IN_CHILD_PROCESSES = ("graph_updates", "skip_temp_135m_64")


def _activate(table: Any, slot: int, position: int, heat: float) -> None:
    table[slot] = 0
    table[slot, Column.POSITION] = position
    table[slot, Column.IS_ACTIVE] = table[slot, Column.IS_NEW] = 1
    table[slot, Column.FIRST_TOKEN] = 11 + slot
    table[slot, Column.KEY_LOW] = 40 + slot
    table[slot, Column.TEMPERATURE] = np.float32(heat).view(np.int32)


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
    served, state = engine.put_on_mesh(params), engine.init_state()
    weights = merge_weights(params, config)
    merged = init_merged_state(config, SLOTS, 32, jnp.float32, "cpu")
    step = jax.jit(merged_step, static_argnames="config", donate_argnums=1)
    table = np.zeros((SLOTS, len(Column)), np.int32)
    admissions = {0: [(0, 0, 1.0), (1, 2, 0.0)], 4: [(2, 1, 0.6)]}  # slot, position, temperature
    for number in range(8):
        for slot, position, heat in admissions.get(number, []):
            _activate(table, slot, position, heat)
            start = start_of(11 + slot, position, SamplingParams(temperature=heat), 40 + slot)
            state = engine.activate(state, slot, start)
        state, expected = engine.generate(served, state)
        merged, result = step(weights, merged, table.copy(), config=config)
        found = unpack_result(np.asarray(result))
        active = np.flatnonzero(table[:, Column.IS_ACTIVE])
        np.testing.assert_array_equal(found.tokens[active], np.asarray(expected.tokens)[active])
        for field in FIELDS[1:]:
            ours, theirs = getattr(found, field), np.asarray(getattr(expected, field))
            np.testing.assert_allclose(ours[active], theirs[active], atol=1e-4)
        table[:, Column.POSITION] += table[:, Column.IS_ACTIVE]
        table[:, Column.COUNT] += table[:, Column.IS_ACTIVE]
        table[:, Column.IS_NEW] = 0


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
