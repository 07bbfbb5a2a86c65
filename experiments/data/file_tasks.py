"""Generated file tasks for mini-swe-agent: a loader, and demonstrations for a warm-up."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_jax.environments import harbor
from lightning_jax.environments.small_files import write_tasks
from lightning_jax.types import Task

PROMPTS = Path(__file__).parents[2] / "agents/mini_swe/small.yaml"


def load_files(
    root: str | Path | None, split: str, cache_dir: Path, *, size: int = 120, dev_size: int = 20
) -> tuple[list[Task], dict[str, int]]:
    """Write the split's task folders under `root`, or the cache, and return its tasks."""
    top = Path(root or cache_dir / "file_tasks").resolve()
    write_tasks(top / split, split, dev_size if split == "dev" else size)
    return harbor.read_tasks(top / split, top, "level")


def demonstrate(tasks: Sequence[Task]) -> list[list[dict[str, Any]]]:
    """Return mini-swe-agent's conversation for each task, with the command of its solution."""
    system = yaml.safe_load(PROMPTS.read_text())["agent"]["system_template"].rstrip("\n")
    return [
        [
            {"role": "system", "content": system},
            {"role": "user", "content": task["instruction"]},
            {"role": "assistant", "content": f"```bash\n{_solution(task)}\n```"},
        ]
        for task in tasks
    ]


def _solution(task: Task) -> str:
    return (Path(task["folder"]) / "solution/solve.sh").read_text().splitlines()[-1]
