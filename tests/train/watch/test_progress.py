"""Tests of the progress of a run within a step."""

import asyncio
import logging
import re

import pytest
from tqdm import tqdm

from lightning_jax.train.watch import progress as progress_module
from lightning_jax.train.watch.progress import Progress, Work, count_work, show_progress


def numbers(line: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", line)]


def test_rollouts_and_tokens_of_the_phase_are_counted() -> None:
    num_tokens = 100.0
    progress = Progress(lambda: Work(num_tokens))
    progress.begin_phase("train 3", 5)
    for _ in range(2):
        progress.rollout_ended("train 3")
    assert progress.line().startswith("train 3: ")
    assert numbers(progress.line()) == [3, 2, 5, 0, 0, 0]
    progress.begin_phase("eval 3", 1)
    assert numbers(progress.line()) == [3, 2, 5, 3, 0, 1, 0, 0, 0]
    for phase in ("train 3", "eval 3", "train 3", "train 3"):
        progress.rollout_ended(phase)
    progress.begin_phase("update 3")
    assert numbers(progress.line()) == [3, 0]


def test_prompts_count_before_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading long prompts takes a minute on a CPU, in which nothing is sampled."""
    now, counts = [0.0], [Work(100.0, 50.0)]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    progress = Progress(lambda: counts[0])
    progress.begin_phase("eval 0", 4)
    now[0], counts[0] = 10.0, Work(120.0, 3050.0)
    assert numbers(progress.line()) == [0, 0, 4, 2, 300, 10]


def test_tokens_count_without_a_number_of_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search for prompts does not know how many rollouts it will need."""
    now, counts = [0.0], [Work()]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    progress = Progress(lambda: counts[0])
    progress.begin_phase("prompts 0")
    now[0] = 10.0
    assert numbers(progress.line()) == [0, 10]
    counts[0] = Work(50.0, 700.0)
    assert numbers(progress.line()) == [0, 5, 70, 10]


def test_a_compilation_is_shown_while_nothing_is_sampled() -> None:
    stats = {"serve/tokens_generated": 0.0, "serve/compiling": 2.0}
    progress = Progress(lambda: count_work(stats))
    progress.begin_phase("eval 0", 4)
    assert numbers(progress.line()) == [0, 0, 4, 0, 0, 2, 0]
    stats["serve/compiling"] = 0.0
    assert numbers(progress.line()) == [0, 0, 4, 0, 0, 0]


async def test_without_a_terminal_the_line_is_logged_at_times(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lightning_jax")
    monkeypatch.setattr(progress_module, "LOG_EVERY_S", 0.01)
    progress = Progress(Work)
    async with show_progress(progress, tqdm(disable=True)):
        while len(caplog.records) < 3:
            await asyncio.sleep(0.01)
    number = len(caplog.records)
    await asyncio.sleep(0.05)
    assert len(caplog.records) == number  # it ends with the block
