"""Tests of the decode measurements on a CPU."""

import math
from pathlib import Path

import pytest
from window.cases import Case, Setting
from window.decode import CASES, VARIANTS, update_times_us
from window.decode_steps import STEPS, bytes_per_step, make_workload

IN_CHILD_PROCESSES = ("graph_updates", "skip_temp_135m_64")


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
