"""Tests of sources of groups that are classes of the reader's."""

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest
from coded import raises_coded
from docs_pages import fenced
from toy_runs import TASKS, ahead_config, groups_of

from lightning_jax.settings import ConfigError
from lightning_jax.settings.loading import load_function
from lightning_jax.train.config import Config
from lightning_jax.train.loop import trainer
from lightning_jax.train.loop.check import check_files
from lightning_jax.train.loop.groups import Groups

NEWEST = """
import json
from pathlib import Path

from lightning_jax.train.loop.groups import Groups


class Newest(Groups):
    def choose(self, groups, number):
        complete = [group for group in groups if group.is_complete]
        if len(complete) < number:
            return None
        with Path(__file__).with_name("chosen.jsonl").open("a") as file:
            keys = [group.key for group in complete[-number:]]
            file.write(json.dumps([self.step, keys]) + "\\n")
        return complete[-number:]


class NoSource:
    def __init__(self, *arguments):
        pass
"""


def _with_source(run_dir: Path, file: Path, name: str) -> Config:
    config = dataclasses.replace(ahead_config(run_dir, ahead=3), num_steps=3)
    rollout = dataclasses.replace(config.rollout, source=f"{file}:{name}")
    return dataclasses.replace(config, rollout=rollout)


async def test_the_class_of_the_page_never_waits_for_a_slow_group(tmp_path: Path) -> None:
    (tmp_path / "schedule.py").write_text(fenced("docs/howto/change_scheduling.md", "python")[0])
    source = load_function(f"{tmp_path}/schedule.py:FirstComplete")
    assert isinstance(source, type) and issubclass(source, Groups)
    groups = await groups_of("(0) 0 1 2")  # by default a step 2 would have to wait
    first = source.__new__(source)
    assert first.choose(groups, 2) == [groups[1], groups[2]]
    assert first.choose(groups[:2], 2) is None
    for group in groups:
        group.running[0].cancel()


def test_a_class_of_the_reader_chooses_the_groups_of_each_step(tmp_path: Path) -> None:
    file = tmp_path / "newest.py"
    file.write_text(NEWEST)
    config = _with_source(tmp_path / "run", file, "Newest")
    check_files(config)
    rows = asyncio.run(trainer.train(config, TASKS, TASKS))
    chosen = [json.loads(line) for line in (tmp_path / "chosen.jsonl").read_text().splitlines()]
    assert [step for step, _ in chosen] == [0, 1, 2]
    assert [row["rollout/num_rollouts"] for row in rows[:3]] == [6.0] * 3
    keys = [tuple(key) for _, some in chosen for key in some]
    assert len(set(keys)) == 6  # none twice


@pytest.mark.parametrize(
    ("name", "reason", "key"),
    [("NoSource", "wrong_type", "rollout.source"), ("Absent", "no_such_function", "Absent")],
)
def test_a_class_that_is_no_source_is_refused(
    name: str, reason: str, key: str, tmp_path: Path
) -> None:
    file = tmp_path / "newest.py"
    file.write_text(NEWEST)
    with raises_coded(ConfigError, reason, key):
        asyncio.run(trainer.train(_with_source(tmp_path / "run", file, name), TASKS, TASKS))
