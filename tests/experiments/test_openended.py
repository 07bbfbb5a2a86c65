"""Tests of the open-ended experiment: its measure, its table and its runs."""

import math
import subprocess
import sys
from pathlib import Path

import openended
import pytest
from openended import Note, Result

from lightning_jax.settings import load_config
from lightning_jax.train.config import Config

ROOT = Path(__file__).parents[2]


def note(task_id: str, *, novelty: float = 1.0, logprob: float = math.log(0.25)) -> Note:
    components = {"similarity": 0.5, "follows": 1.0, "novelty": novelty, "complete": 1.0}
    return Note(task_id, "Write.", f"Note {task_id}.", components, logprob)


def test_held_out_is_the_mean_of_probability_novelty_and_form() -> None:
    assert note("dev0", novelty=0.75).held_out == pytest.approx((0.25 + 0.75 + 1.0) / 3)


def test_changes_compare_the_same_request() -> None:
    before = [note("dev0"), note("dev1"), note("dev2")]
    result = Result(before, [note("dev0", novelty=0.4), note("dev2")])
    assert result.changes == pytest.approx([-0.2, 0.0])


def test_the_table_has_a_row_per_reward_and_counts_changes() -> None:
    worse = Result([note("dev0"), note("dev1")], [note("dev0", novelty=0.4), note("dev1")])
    better = Result([note("dev0")], [note("dev0", logprob=0.0)])
    lines = openended.table({"proxy": [worse, worse], "judge": [better]}).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[2][:3] == ["before", "0.500", "1.000"]
    assert cells[3][0] == "proxy" and cells[3][-2:] == ["0.650 ± 0.000", "0, 2"]
    assert cells[4][0] == "judge" and cells[4][-2:] == ["1.000", "1, 0"]


def test_samples_are_the_first_requests_of_the_first_seed() -> None:
    notes = [note(f"dev{number}") for number in range(5)]
    shown = openended.samples({"proxy": [Result(notes, notes[:1]), Result(notes, notes)]})
    assert shown.count("* before:") == openended.NUM_SAMPLES
    assert shown.count("(nothing)") == openended.NUM_SAMPLES - 1


@pytest.mark.parametrize("name", openended.REWARDS)
def test_each_reward_is_a_config(name: str) -> None:
    config = load_config(Config, [openended.CONFIG, *openended.REWARDS[name]])
    weighted = {key for key, reward in config.rewards.items() if reward.weight}
    held_out = {"novelty", "complete"}
    assert weighted and not weighted & held_out and held_out < set(config.rewards)


@pytest.mark.slow
def test_runs_train_once_and_leave_a_report(tmp_path: Path) -> None:
    command = [
        *(sys.executable, str(ROOT / "experiments" / "openended.py"), "model.name=tiny"),
        *(f"run_dir={tmp_path}", "num_steps=1", "rollout.tasks_per_step=1", "eval.num_tasks=2"),
        *("serve.max_len=1024", "rollout.max_tokens=8", "rollout.group_size=2", "batch.rows=8"),
    ]
    subprocess.run(command, check=True, capture_output=True)
    report = (tmp_path / "report.md").read_text()
    assert all(f"| {name} " in report for name in openended.REWARDS)
    assert (tmp_path / "openended.png").stat().st_size > 10_000
    logs = {name: (tmp_path / f"{name}-0.log").stat().st_mtime_ns for name in openended.REWARDS}
    subprocess.run(command, check=True, capture_output=True)
    assert logs == {name: (tmp_path / f"{name}-0.log").stat().st_mtime_ns for name in logs}
