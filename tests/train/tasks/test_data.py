"""Tests of loading a run's tasks: the loader's options, ids, limits and counts."""

from pathlib import Path
from typing import Any

import pytest
from coded import raises_coded
from log_events import records

from lightning_jax.settings import ConfigError, load_config
from lightning_jax.train.config import Config
from lightning_jax.train.tasks.data import load_tasks
from lightning_jax.train.tasks.record_files import DatasetError

LOADER = """
def load(root, split, cache_dir, *, size: int = 10, kinds: tuple[str, ...] = ("x",)):
    assert cache_dir.name == "data" and isinstance(kinds, tuple)
    ids = [f"{root}-{split}-{i}" for i in range(size)]
    return [{"id": name, "kinds": kinds} for name in ids], {"broken": 3} if split == "dev" else {}
"""


def _load(folder: Path, text: str, *settings: str) -> tuple[list[Any], list[Any]]:
    file = folder / "loader.py"
    file.write_text(text)
    load = [f"run_dir={folder}/run", f"data.load={file}:load", "data.root=there", *settings]
    return load_tasks(load_config(Config, load))


def test_the_loader_gets_the_options_and_its_counts_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lightning_jax")
    options = ("data.options.size=4", "data.options.kinds=[a,b]", "data.max_train_tasks=2")
    train, dev = _load(tmp_path, LOADER, *options)
    assert [task["id"] for task in train] == ["there-train-0", "there-train-2"]  # evenly spaced
    assert [task["id"] for task in dev] == [f"there-dev-{i}" for i in range(4)]
    assert dev[0]["kinds"] == ("a", "b")
    (record,) = records(caplog, "tasks_loaded")
    assert record.left_out == {"train": {"over_max_train_tasks": 2}, "dev": {"broken": 3}}


@pytest.mark.parametrize("option", ["colour=red", "size=large", "kinds=3"])
def test_an_option_that_the_loader_does_not_take_is_named(tmp_path: Path, option: str) -> None:
    key = f"data.options.{option.partition('=')[0]}"
    with raises_coded(ConfigError, "invalid", key) as caught:
        _load(tmp_path, LOADER, f"data.options.{option}")
    assert "size, kinds" in str(caught.value)


@pytest.mark.parametrize(
    "tasks, reason, key",
    [
        ("[], {'broken': 2}", "empty", "train"),
        ("[{'id': 'a'}, {'id': 'b'}, {'id': 'a'}], {}", "duplicate", "id"),
        ("[{'id': 1}, {'id': 2}], {}", "wrong_type", "id"),
        ("[{'question': 'Why?'}], {}", "wrong_type", "id"),
    ],
)
def test_tasks_need_unique_ids(tmp_path: Path, tasks: str, reason: str, key: str) -> None:
    with raises_coded(DatasetError, reason, key):
        _load(tmp_path, f"def load(root, split, cache_dir):\n    return {tasks}\n")


def test_a_loader_of_another_form_is_refused(tmp_path: Path) -> None:
    with raises_coded(ConfigError, "wrong_type", "data.load"):
        _load(tmp_path, "def load(root, split, cache_dir):\n    return [{'id': 'a'}]\n")
    with raises_coded(ConfigError, "wrong_signature", "data"):
        _load(tmp_path, "def load(root):\n    return [], {}\n")


def test_without_a_loader_the_files_are_read(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"q": 1}\n')
    with raises_coded(DatasetError, "too_few", "data.root"):  # the only task is for dev
        load_tasks(load_config(Config, [f"data.root={file}"]))
    file.write_text('{"q": 1}\n{"q": 2}\n')
    train, dev = load_tasks(load_config(Config, [f"data.root={file}"]))
    assert {task["q"] for task in train + dev} == {1, 2}
