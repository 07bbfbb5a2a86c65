"""Tests of the tables of runs and of their comparison, over directories made by hand."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from coded import raises_coded
from view_records import add, rollout

from lightning_jax.cli.main import main
from lightning_jax.settings import ConfigError, save_config
from lightning_jax.studio.comparison import group_names
from lightning_jax.studio.comparison_tables import compare_runs, plot_runs
from lightning_jax.studio.records import Grid, columns
from lightning_jax.studio.runs import find_runs, read_run, runs_table
from lightning_jax.studio.terminal import as_markdown
from lightning_jax.traces.store import Store
from lightning_jax.train.config import Config
from lightning_jax.train.directory import locked, read_end


def make(
    directory: Path, rewards: Mapping[int, float], *, num_steps: int = 2, seed: int = 0
) -> Path:
    """Write a finished run whose last evaluation gave these rewards by task."""
    directory.mkdir(parents=True)
    save_config(Config(num_steps=num_steps, seed=seed), directory / "config.yaml")
    (directory / "sources.json").write_text('{"agent": "same"}')
    mean = sum(rewards.values()) / len(rewards)
    done = {"rollout/num_rollouts": 8, "train/num_updates": 1.0}
    rows = [
        {"step": 0, "time/step_s": 90.0, "rollout/reward_mean": 0.25} | done,
        {"step": 1, "time/step_s": 30.0, "rollout/reward_mean": 0.75} | done,
        {"step": 2, "time/eval_s": 60.0, "eval/reward_mean": mean, "eval/reward_stderr": 0.125},
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    store = Store(directory / "store.sqlite")
    for task, reward in rewards.items():
        add(store, rollout(0, reward, phase="eval", step=2, task_index=task), [])
    failed = rollout(0, step=1, status="agent_failure", reason="deadline")
    add(store, failed, [])
    store.close()
    return directory


def table(grids: list[Grid], title: str) -> Grid:
    return next(grid for grid in grids if grid.title.startswith(title))


def test_a_line_for_each_run_has_its_results(tmp_path: Path) -> None:
    make(tmp_path / "deep" / "a", {0: 1.0, 1: 0.0, 2: 1.0})
    (tmp_path / "no_run").mkdir()
    grid = runs_table(find_runs(tmp_path))
    (row,) = (dict(zip((c.name for c in grid.columns), row, strict=True)) for row in grid.rows)
    assert (row["run"], row["status"], row["steps"]) == ("deep/a", "finished", "2 of 2")
    assert (row["minutes"], row["last"], row["rollouts"]) == ("3.0", "0.667", "4")
    assert row["failed"] == "25.0%"


def test_a_damaged_run_has_a_line_too(tmp_path: Path) -> None:
    run = make(tmp_path / "a", {0: 1.0})
    (run / "config.yaml").write_text("{")
    (run / "store.sqlite").write_bytes(b"nothing")
    found = read_run(run)
    assert (found.total_steps, found.failed_share, found.started_s) == (None, None, None)
    assert len(runs_table([found]).rows) == 1


@pytest.mark.parametrize(("name", "reason"), [("nothing", "not_found"), (".", "empty")])
def test_a_folder_without_runs_is_refused(name: str, reason: str, tmp_path: Path) -> None:
    with raises_coded(ConfigError, reason, str(tmp_path / name)):
        find_runs(tmp_path / name)


def test_the_status_says_how_the_last_process_ended(tmp_path: Path) -> None:
    run = make(tmp_path / "a", {0: 1.0}, num_steps=9)
    assert read_run(run).status == "stopped"  # of a release that did not record it
    with locked(run):
        assert read_run(run).status == "running"
    assert read_run(run).status == "finished"
    with pytest.raises(KeyboardInterrupt), locked(run):
        raise KeyboardInterrupt
    assert read_run(run).status == "stopped"
    with pytest.raises(ConfigError), locked(run):
        raise ConfigError("the lake is empty", reason="empty")
    found, end = read_run(run), read_end(run)
    assert found.status == "failed" and "the lake is empty" in found.why
    assert end is not None and end.reason == "empty"


def test_runs_are_compared_by_settings_curves_and_tasks(tmp_path: Path) -> None:
    first = make(tmp_path / "a", dict.fromkeys(range(8), 0.0))
    second = make(tmp_path / "b", dict.fromkeys(range(7), 1.0) | {9: 1.0}, num_steps=3)
    grids = compare_runs([[read_run(first)], [read_run(second)]])
    assert table(grids, "Settings").rows == (("num_steps", "2", "3"),)
    assert table(grids, "Greedy").rows == (("2", "0.000 ± 0.125", "1.000 ± 0.125"),)
    assert table(grids, "Reward").rows == (("0", "0.250", "0.250"), ("1", "0.750", "0.750"))
    tasks = table(grids, "b against a, step 2")
    assert len(tasks.rows) == 7 and tasks.rows[0][1:] == ("0.000", "1.000", "+1.000")
    # 7 of 7: twice 1 / 2^7.
    assert "7 won, 0 lost" in tasks.notes[1] and "p = 0.016" in tasks.notes[1]


@pytest.mark.parametrize(("axis", "places"), [("samples", ["16"]), ("minutes", ["2"])])
def test_curves_may_be_over_samples_or_minutes(axis, places: list[str], tmp_path: Path) -> None:
    runs = [[read_run(make(tmp_path / name, {0: 1.0}))] for name in "ab"]
    assert [row[0] for row in table(compare_runs(runs, axis), "Greedy").rows] == places


def test_seeds_count_as_one_experiment(tmp_path: Path) -> None:
    rewards = {"a0": 0.0, "a1": 0.5, "b0": 0.5, "b1": 1.0}
    made = {
        name: read_run(make(tmp_path / name, {0: reward}, seed=int(name[1])))
        for name, reward in rewards.items()
    }
    grids = compare_runs([[made["a0"], made["a1"]], [made["b0"], made["b1"]]])
    assert table(grids, "Settings").rows == ()
    seeds = table(grids, "Over seeds")
    # Standard error of 0 and 0.5: 0.3536 / sqrt(2) = 0.25. Of the difference: sqrt(2) * 0.25.
    assert seeds.rows == (
        ("a0 and 1 more", "2", "0.250", "0.250"),
        ("b0 and 1 more", "2", "0.750", "0.250"),
    )
    assert seeds.notes == ("difference +0.500 ± 0.354",)


def test_runs_of_the_same_name_keep_their_paths(tmp_path: Path) -> None:
    runs = [read_run(make(tmp_path / where / "first", {0: 1.0})) for where in "ab"]
    assert group_names([[run] for run in runs]) == [run.name for run in runs]
    with raises_coded(ConfigError, "repeated", "RUN"):
        group_names([[runs[0]], [runs[0]]])


def test_curves_are_drawn(tmp_path: Path) -> None:
    runs = [[read_run(make(tmp_path / name, {0: 1.0}))] for name in "ab"]
    plot_runs(runs, "steps", tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    with raises_coded(ConfigError, "invalid", "--png"):
        plot_runs(runs, "steps", tmp_path / "c.txt")


def test_markdown_escapes_what_it_would_read() -> None:
    text = as_markdown(Grid("t", columns("a|b", "n", numbers=("n",)), (("<b>", "1"),)))
    assert text.splitlines()[2:] == ["| a\\|b | n |", "| --- | ---: |", "| \\<b\\> | 1 |"]


def test_the_commands_print_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (str(make(tmp_path / name, {0: 1.0})) for name in "ab")
    assert main(["runs", str(tmp_path)]) == 0
    assert main(["compare", a, b, "--markdown"]) == 0
    assert "### b against a, step 2" in capsys.readouterr().out
    assert main(["compare", a]) == 1
    assert "two run directories" in capsys.readouterr().err


def test_a_wrong_path_of_a_picture_is_refused_before_anything_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = (str(make(tmp_path / name, {0: 1.0})) for name in "ab")
    assert main(["compare", a, b, "--png", str(tmp_path / "c.txt")]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and "--png" in printed.err
    assert main(["compare", a, b, "--png", str(tmp_path / "c.png")]) == 0
    assert capsys.readouterr().out.endswith(f"curves: {tmp_path / 'c.png'}\n")
