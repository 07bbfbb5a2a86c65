"""Tests of mini-swe-agent's file tasks: their demonstrations are the solutions."""

from pathlib import Path

import file_tasks


def test_demonstrations_are_the_solutions(tmp_path: Path) -> None:
    tasks, left_out = file_tasks.load_files(None, "train", tmp_path, size=4)
    assert [task["level"] for task in tasks] == [0, 1, 0, 1] and left_out == {}
    (system, user, answer), copy = file_tasks.demonstrate(tasks[:2])
    assert "```bash\necho sun > sky.txt\n```" in system["content"]
    word, name = user["content"].split()[3], user["content"].rstrip(".").split()[-1]
    assert answer["content"] == f"```bash\necho {word} > {name}\n```"
    assert copy[2]["content"].startswith("```bash\ncp ")


def test_each_split_has_its_size(tmp_path: Path) -> None:
    splits = [file_tasks.load_files(tmp_path, split, tmp_path)[0] for split in ("train", "dev")]
    assert [len(tasks) for tasks in splits] == [120, 20]
