"""Tests of the generated file tasks: solvable by their solutions, different in each split."""

import asyncio
from pathlib import Path

import file_tasks

from lightning_jax.environments import harbor
from lightning_jax.types import LLM

NOBODY = LLM("http://localhost:1/v1", "key", "policy")


def test_solutions_earn_the_reward_and_nothing_else_does(tmp_path: Path) -> None:
    tasks, left_out = file_tasks.load_files(None, "train", tmp_path, size=4)
    assert [task["level"] for task in tasks] == [0, 1, 0, 1] and left_out == {}
    scripts = {"true": 0.0, "touch {name}": 0.2}
    for task in tasks[:2]:
        name = task["instruction"].rstrip(".").split()[-1]
        solution = file_tasks._solution(task)
        for script, reward in (scripts | {solution: 1.0}).items():
            command = ["bash", "-c", script.format(name=name)]
            found = asyncio.run(harbor.run(task, NOBODY, command=command))
            assert found["reward"] == reward


def test_words_of_dev_are_not_trained_on_and_demonstrations_are_the_solutions(
    tmp_path: Path,
) -> None:
    splits = [file_tasks.load_files(tmp_path, split, tmp_path)[0] for split in ("train", "dev")]
    assert [len(tasks) for tasks in splits] == [120, 20]
    train, dev = ({task["instruction"].split()[3] for task in tasks[::2]} for tasks in splits)
    assert len(train) > 15 and len(dev) > 3 and not train & dev
    (system, user, answer), copy = file_tasks.demonstrate(splits[0][:2])
    assert "```bash\necho sun > sky.txt\n```" in system["content"]
    word, name = user["content"].split()[3], user["content"].rstrip(".").split()[-1]
    assert answer["content"] == f"```bash\necho {word} > {name}\n```"
    assert copy[2]["content"].startswith("```bash\ncp ")
