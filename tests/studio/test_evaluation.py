"""Tests of the tables of an evaluation and of a comparison."""

import json
from pathlib import Path

import pytest
from coded import raises_coded
from rich.console import Console, RenderableType
from view_records import add, make_run, rollout

from lightning_jax.errors import UserError
from lightning_jax.rollouts.results.compare_tasks import compare_tasks
from lightning_jax.settings import ConfigError
from lightning_jax.studio.comparison_tables import MAX_SHOWN, comparison_table
from lightning_jax.studio.evaluation import (
    Calls,
    count_calls,
    evaluation_table,
    read_rewards,
    task_results,
    write_results,
)
from lightning_jax.studio.terminal import as_terminal
from lightning_jax.traces.store import Store


def _lines(rendered: RenderableType) -> list[list[str]]:
    console = Console(width=100)
    with console.capture() as captured:
        console.print(rendered)
    return [line.split() for line in captured.get().splitlines()]


def test_numbers_beyond_the_columns_are_listed_below() -> None:
    metrics = {f"own{index}": index / 10 for index in range(7)}
    done = rollout(0, 1.0, phase="eval", metrics=metrics)
    failed = rollout(0, phase="eval", task_index=1, status="agent_failure", reason="deadline")
    calls = {done.rollout_id: Calls(2, 4, 1), failed.rollout_id: Calls(0, 0, 0)}
    header, row, below = _lines(as_terminal(evaluation_table({"all": [done, failed]}, calls), 100))
    assert header[-5:] == [f"own{index}" for index in range(5)]
    # Tasks, reward, failed, no call (of the scored), calls, cut, and means with 0 for the failed.
    assert row[1:8] == ["2", "0.500", "±", "0.500", "1", "0%", "1.0"]
    assert row[8:] == ["25%", "0.000", "0.050", "0.100", "0.150", "0.200"]
    assert below == ["all:", "own5", "0.250", "own6", "0.300"]


def test_components_have_columns_beside_the_agents_own_numbers() -> None:
    components = {"agent": 1.0, "partial": 0.25}
    done = rollout(0, 1.0, phase="eval", metrics={"f1": 0.5}, components=components)
    calls = {done.rollout_id: Calls(1, 1, 0)}
    header, row = _lines(as_terminal(evaluation_table({"all": [done]}, calls), 100))
    assert header[-3:] == ["agent", "partial", "f1"]
    assert row[-3:] == ["1.000", "0.250", "0.500"]


def test_numbers_that_a_narrow_terminal_has_no_room_for_are_listed_whole() -> None:
    metrics = {"execution_accuracy": 0.404, "exact_match": 0.25}
    components = {"agent": 0.409, "likeness": 0.464}
    done = rollout(0, 0.409, phase="eval", metrics=metrics, components=components)
    calls = {done.rollout_id: Calls(1, 1, 0)}
    grid = evaluation_table({"all": [done], "source=svamp": [done]}, calls)
    header, row, _, *below = _lines(as_terminal(grid, 80))
    assert header[:4] == ["tasks", "n", "reward", "failed"]
    assert header[-3:] == ["cut", "agent", "likeness"]
    assert row[:2] == ["all", "1"] and row[-2:] == ["0.409", "0.464"]
    numbers = ["exact_match", "0.250", "execution_accuracy", "0.404"]
    assert below == [["all:", *numbers], ["source=svamp:", *numbers]]


def test_a_comparison_shows_the_largest_changes() -> None:
    before = {f"t{index}": [0.0] for index in range(MAX_SHOWN + 5)}
    after = {task: [index / 100] for index, task in enumerate(before)}
    grid = comparison_table(compare_tasks(before, after | {"new": [1.0]}), "x", "old\x1b", "new")
    assert [row[0] for row in grid.rows] == [f"t{index}" for index in range(MAX_SHOWN + 4, 4, -1)]
    assert "\x1b" not in "".join(grid.notes) and len(grid.notes) == 3
    for other in ({}, after):
        assert comparison_table(compare_tasks(other, after), "x").rows == ()


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    rollouts = [rollout(index, index / 2, phase="eval", metrics={"f1": 0.5}) for index in range(3)]
    rollouts.append(rollout(3, phase="eval", status="infrastructure_failure", reason="crash"))
    calls = {done.rollout_id: Calls(1, 1, 0) for done in rollouts}
    (result,) = task_results(rollouts, calls)
    assert (result.rewards, result.failures) == ((0.0, 0.5, 1.0), {"crash": 1})
    assert result.metrics == {"f1": 0.5} and result.num_calls == (1, 1, 1, 1)
    rollouts.append(rollout(4, 1.0, phase="eval", metrics={"dropped_metrics/null/f1": 1.0}))
    calls[rollouts[-1].rollout_id] = Calls(1, 1, 0)
    assert task_results(rollouts, calls)[0].metrics["f1"] == 0.5  # of those that have a value
    path = tmp_path / "results.jsonl"
    write_results(path, [result])
    assert read_rewards(path) == (str(path), {"task_0": [0.0, 0.5, 1.0]})


@pytest.mark.parametrize("line", ["{}", '{"id": 1, "rewards": []}', '{"id": "a", "rewards": "x"}'])
def test_another_file_is_refused(line: str, tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(json.dumps({"id": "ok", "rewards": [1.0]}) + "\n" + line)
    with raises_coded(ConfigError, "malformed", f"{path}:2"):
        read_rewards(path)


def test_the_last_evaluation_of_a_run_counts(tmp_path: Path) -> None:
    with raises_coded(UserError, "empty", str(tmp_path)):
        read_rewards(tmp_path)
    run = make_run(tmp_path / "run")
    store = Store(run / "store.sqlite")
    for attempt, reward in enumerate((0.25, 0.75), start=1):
        add(store, rollout(0, reward, phase="eval", step=9, attempt=attempt), [])
    calls = count_calls(store, store.rollouts(phase="train"))
    store.close()
    name, rewards = read_rewards(run)
    assert name == f"{run}, step 9" and rewards == {"task_0": [0.75]}
    assert max(found.number for found in calls.values()) == 2
