"""Tests of the engine's and the update's measurements on a borrowed accelerator."""

import gzip
import json
import math
from pathlib import Path

import pytest
from window import engine, update
from window.cases import Case, Figure, Setting
from window.engine import Call, Clock, Kernel, admission_cost, kernels_of, plain_steps, steps_of

ONLY_ON_A_GPU = {
    "no copy rate for this device",
    "no peak rate for this device",
    "this device does not count memory",
    "the trace has no stream of a GPU",
    "tokamax is not installed",
    "skipped: needs a GPU",
}


def test_trace_summary_has_only_streams_of_gpus(tmp_path: Path) -> None:
    def name(kind: str, text: str, pid: int, tid: int = 0) -> dict[str, object]:
        return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": text}}

    def event(text: str, microseconds: float, pid: int, tid: int) -> dict[str, object]:
        return {"ph": "X", "name": text, "ts": 0, "dur": microseconds, "pid": pid, "tid": tid}

    events = [
        name("process_name", "/device:GPU:0", 1),
        name("process_name", "/host:CPU", 2),
        name("thread_name", "Stream #13(Compute,MemcpyD2H)", 1, 13),
        name("thread_name", "XLA Modules", 1, 14),
        name("thread_name", "Stream of a host", 2, 15),
        event("loop_add_fusion_1", 2.0, 1, 13),
        event("loop_add_fusion_12", 3.0, 1, 13),
        event("gemm_fusion_dot.7.2", 9.0, 1, 13),
        event("MemcpyD2H", 1.0, 1, 13),
        event("jit_generate", 15.0, 1, 14),
        event("python", 99.0, 2, 15),
    ]
    trace = tmp_path / "a.trace.json.gz"
    with gzip.open(trace, "wt") as file:
        json.dump({"traceEvents": events}, file)
    assert kernels_of(trace) == [
        Kernel("gemm_fusion_dot", 1, 9.0),
        Kernel("loop_add_fusion", 2, 5.0),
        Kernel("MemcpyD2H", 1, 1.0),
    ]


def test_steps_separate_admissions_from_plain_ones() -> None:
    calls = [
        Call("generate", 0.0, 0.0, 0.1),
        Call("read", 0.2, 0.1, 0.3),
        Call("generate", 1.0, 0.5, 0.2),
        Call("restore", 1.3, 0.6, 0.4),
        Call("prefill", 1.8, 0.7, 0.1),
        Call("store", 2.0, 0.8, 0.1),
        Call("generate", 4.0, 1.5, 0.1),
    ]
    first, second = steps_of(calls)
    assert (first.wall_s, first.cpu_s, first.dispatch_s, first.wait_s) == (1.0, 0.5, 0.1, 0.3)
    assert second.others == ("restore", "prefill", "store")
    assert plain_steps(calls) == [first]
    assert admission_cost(calls) == pytest.approx(
        {"time": 2000.0, "engine thread CPU": 500.0, "dispatches": 3.0}
    )
    assert admission_cost(calls[:3]) == {}


def test_clock_ignores_calls_of_other_threads() -> None:
    clock = Clock()
    assert clock.wrap("read", lambda value: value + 1)(1) == 2
    assert clock.calls == []


def test_error_after_a_figure_becomes_a_note() -> None:
    def measure():
        yield Figure("first", 1.0, "ms")
        raise MemoryError("out of memory\nmore")

    first, second = engine.attempt("second", "ms", measure)
    assert first.value == 1.0
    assert math.isnan(second.value) and second.note == "MemoryError: out of memory"


def test_tokenizer_has_a_token_for_each_id() -> None:
    tokenizer = engine._tokenizer(1000)
    assert len(tokenizer.vocabulary) == 1000
    assert tokenizer.decode([700]) and tokenizer.encode("abc")


@pytest.mark.slow
@pytest.mark.parametrize("case", [*engine.CASES, *update.CASES], ids=lambda case: case.name)
def test_each_case_rehearses_on_a_cpu(case: Case, tmp_path: Path, restored_sigterm: None) -> None:
    found = list(case.run(Setting(tmp_path / "out", tmp_path / "work", 60.0, is_tiny=True)))
    assert found and len({figure.name for figure in found}) == len(found)
    missing = {figure.note for figure in found if not math.isfinite(figure.value)}
    assert missing <= ONLY_ON_A_GPU
