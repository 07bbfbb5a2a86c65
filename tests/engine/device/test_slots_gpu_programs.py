"""Counts of the engine's programs, as XLA compiles them for a GPU that is not here.

Left out of `make test`: python -m pytest -m gpu_compiler, as docs/gpu_cluster.md says. A program
takes about ten seconds on an idle core.

What exceeds its bar is expected to fail, and so is what improves: the figure in `TODAY` is then
replaced by the new one.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import pytest
from gpu_programs import SLOTS, STEPS, EnginePrograms, ProgramCounts
from window.shapes import shape_of

pytestmark = pytest.mark.gpu_compiler
NAMES = [one.name for one in fields(ProgramCounts)]
MIB = 2**20
SLACK = 1.02  # other versions of XLA fuse a little more or less

# JAX 0.11.2 with the plugin for CUDA 13, for an H100.
TODAY = {
    # launches, graphs, reads, kernels, arguments, temp_bytes, undonated_bytes
    ("135m", "generate"): ProgramCounts(1, 1, 0, 414, 15, 12_777_752, 0),
    ("135m", "generate_8"): ProgramCounts(1, 1, 0, 417, 15, 1_609_752, 0),
    ("135m", "generate_steps"): ProgramCounts(1, 1, 0, 1660, 48, 12_818_992, 0),
    ("135m", "generate_filtered"): ProgramCounts(1, 1, 0, 580, 15, 41_006_384, 0),
    ("135m", "steps_filtered"): ProgramCounts(1, 1, 0, 2323, 48, 41_017_424, 0),
    ("135m", "generate_adjusted"): ProgramCounts(1, 1, 0, 415, 17, 12_777_496, 0),
    ("135m", "generate_full"): ProgramCounts(1, 1, 0, 598, 17, 41_071_152, 0),
    ("135m", "generate_biased"): ProgramCounts(1, 1, 0, 599, 18, 53_654_328, 0),
    ("135m", "prefill"): ProgramCounts(1, 1, 0, 443, 14, 8_741_600, 0),
    ("135m", "restore"): ProgramCounts(2, 0, 0, 2, 5, 0, 0),
    ("135m", "store"): ProgramCounts(2, 0, 0, 2, 5, 0, 0),
    ("1.5b", "generate"): ProgramCounts(1, 1, 0, 389, 18, 39_254_552, 0),
    ("1.5b", "generate_adjusted"): ProgramCounts(1, 1, 0, 391, 20, 39_348_504, 0),
    ("1.5b", "prefill"): ProgramCounts(1, 1, 0, 386, 17, 35_677_648, 0),
    ("1.5b", "restore"): ProgramCounts(2, 0, 0, 2, 5, 0, 0),
    ("1.5b", "store"): ProgramCounts(2, 0, 0, 2, 5, 0, 0),
    ("8b", "generate"): ProgramCounts(1, 1, 0, 777, 18, 39_441_944, 0),
    ("8b", "generate_adjusted"): ProgramCounts(1, 1, 0, 779, 20, 39_453_464, 0),
    ("8b", "prefill"): ProgramCounts(1, 1, 0, 712, 17, 42_231_824, 0),
    ("8b", "restore"): ProgramCounts(2, 0, 0, 2, 5, 0, 0),
    ("8b", "store"): ProgramCounts(2, 0, 0, 2, 5, 0, 0),
}


def bars(model: str, program: str) -> ProgramCounts:
    """Return the most that a program should count.

    A decode step needs the logits, and little else. No program copies a part of the cache. Several
    steps need no more memory than one.
    """
    steps = STEPS if "steps" in program else 1
    shape = shape_of(model).shape
    is_copy = program in ("store", "restore")
    temp_bytes = 4 * SLOTS * shape.vocab_size + 4 * MIB
    if is_copy or program == "prefill":
        temp_bytes = 64 * MIB
    return ProgramCounts(
        launches=1 + is_copy,  # two kernels are too few for a graph
        graphs=1,
        reads=0,
        kernels=4 if is_copy else steps * (14 * shape.num_layers + 30),
        arguments=16 * steps,
        temp_bytes=temp_bytes,
        undonated_bytes=0,
    )


def cases() -> Iterator[Any]:
    """Yield each figure of each program. Those above their bar are expected to fail."""
    for (model, program), today in TODAY.items():
        for name in NAMES:
            figure, bar = getattr(today, name), getattr(bars(model, program), name)
            reason = f"{figure:,} today, the bar is {bar:,}"
            fails = pytest.mark.xfail(strict=True, raises=AssertionError, reason=reason)
            marks = [fails] if figure > bar else []
            yield pytest.param(model, program, name, marks=marks)


@functools.cache
def engine_of(model: str, devices: Sequence[Any]) -> EnginePrograms:
    return EnginePrograms(model, devices)


@functools.cache
def counts_of(model: str, program: str, devices: Sequence[Any]) -> ProgramCounts:
    return engine_of(model, devices).count(program)


@pytest.mark.parametrize(("model", "program", "name"), list(cases()))
def test_count_is_within_its_bar(model: str, program: str, name: str, h100: Sequence[Any]) -> None:
    counts = counts_of(model, program, h100)
    assert getattr(counts, name) <= getattr(bars(model, program), name)


@pytest.mark.parametrize(("model", "program"), TODAY)
def test_counts_are_no_more_than_before(model: str, program: str, h100: Sequence[Any]) -> None:
    counts, today = counts_of(model, program, h100), TODAY[model, program]
    grown = {name for name in NAMES if getattr(counts, name) > SLACK * getattr(today, name)}
    assert not grown, (counts, today)


def test_all_programs_are_counted(h100: Sequence[Any]) -> None:
    names = {program for model, program in TODAY if model == "135m"}
    assert names == set(engine_of("135m", h100).lowerings)
