"""Tests of the generated file tasks: solvable by their solutions, different in each split."""

import asyncio
from pathlib import Path

import pytest

from lightning_jax.environments import harbor
from lightning_jax.environments.small_files import write_tasks
from lightning_jax.types import LLM

NOBODY = LLM("http://localhost:1/v1", "key", "policy")
# Rewards of doing nothing and of a first step at each level; the name is that of the file.
FIRST_STEPS = ["touch {name}", "touch {name}", "echo {word} > {name}"]


@pytest.mark.parametrize("level", [0, 1, 2])
def test_solutions_earn_the_reward_and_a_first_step_a_part(level: int, tmp_path: Path) -> None:
    write_tasks(tmp_path / "train", "train", 3, levels=3)
    task = harbor.read_tasks(tmp_path / "train", tmp_path, "level")[0][level]
    assert task["level"] == level
    words = task["instruction"].rstrip(".").split()
    begun = FIRST_STEPS[level].format(name=words[-1], word=words[-3])
    solution = (Path(task["folder"]) / "solution/solve.sh").read_text()
    for script, reward in {"true": 0.0, begun: 0.2, solution: 1.0}.items():
        command = ["bash", "-c", script]
        result = asyncio.run(harbor.run(task, NOBODY, command=command, sandbox="processes"))
        assert result["reward"] == reward, script


def test_words_of_dev_are_in_no_train_task(tmp_path: Path) -> None:
    words = {}
    for split, number in (("train", 60), ("dev", 12)):
        write_tasks(tmp_path / split, split, number, levels=3)
        tasks, left_out = harbor.read_tasks(tmp_path / split, tmp_path, "level")
        assert len(tasks) == number and not left_out
        words[split] = {task["instruction"].split()[3] for task in tasks if task["level"] != 1}
    assert len(words["train"]) > 12 and len(words["dev"]) > 2
    assert not words["train"] & words["dev"]
