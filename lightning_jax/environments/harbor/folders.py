"""Folders of Harbor tasks: what is read of them, and the files that an attempt starts from."""

import os
import re
import shlex
import shutil
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_jax.environments.sandbox import WORK, Box
from lightning_jax.errors import UserError
from lightning_jax.settings.loading import part_of
from lightning_jax.types import Task

NEEDS_DOCKER = "needs_docker"  # reason of tasks that an image can serve
# Directories that a container has and that a working directory cannot be here.
TAKEN = {
    *("bin", "boot", "dev", "etc", "home", "lib", "lib32", "lib64", "logs", "media", "mnt", "opt"),
    *("proc", "root", "run", "sbin", "solution", "srv", "sys", "tests", "tmp", "usr", "var"),
}


class NeedsDocker(Exception):
    """Task whose environment is more than files. The message is the reason."""


@dataclass(frozen=True)
class Setup:
    """Working directory, files and variables of a task whose Dockerfile makes nothing else."""

    workdir: str
    copies: tuple[tuple[str, str], ...]  # (source in environment/, path in the working directory)
    variables: Mapping[str, str]


def load(
    root: str | Path | None,
    split: str,
    cache_dir: Path,
    *,
    field: str = "difficulty",
    docker: bool = False,
) -> tuple[list[Task], dict[str, int]]:
    """Return the split's tasks in order of their names, and the number left out for each reason.

    `root` has task folders, of which a fixed fifth is dev, or folders `train` and `dev` with them.
    Tasks that need Docker are left out, unless `docker`. A task has the fields `instruction`,
    `folder`, and `field` if the `[metadata]` of its task.toml has it. Raises UserError.
    """
    if root is None or not Path(root).is_dir():
        raise UserError.not_found(
            "data.root", f"data.root is {root!r}; expected a folder of Harbor tasks."
        )
    top = Path(root).resolve()
    parts = (top / "train", top / "dev")
    is_split = all(part.is_dir() and not (part / "task.toml").exists() for part in parts)
    tasks, left_out = read_tasks(top / split if is_split else top, top, field, docker)
    if not is_split:
        tasks = part_of(split, tasks)
    return tasks, left_out


def read_tasks(
    folder: Path, top: Path, field: str = "difficulty", docker: bool = False
) -> tuple[list[Task], dict[str, int]]:
    """Return all tasks in a folder, and the number left out for each reason. Raises UserError.

    Ids are paths relative to `top`. Agents cannot read what is in it.
    """
    tasks, left_out = [], Counter[str]()
    for path in _task_folders(folder):
        try:
            tasks.append(read_task(path, top, field, docker))
        except NeedsDocker as reason:
            left_out[str(reason)] += 1
    return tasks, dict(left_out)


def read_task(folder: Path, top: Path, field: str = "difficulty", docker: bool = False) -> Task:
    """Return the task of a folder under `top`. Raises UserError, or NeedsDocker."""
    settings = read_settings(folder)
    try:
        read_setup(folder, settings)
    except NeedsDocker as reason:
        if not docker or str(reason) != NEEDS_DOCKER:
            raise
    for name in ("instruction.md", "tests/test.sh"):
        if not (folder / name).is_file():
            raise UserError.missing(str(folder / name), f"{folder} has no {name}; add it.")
    text = (folder / "instruction.md").read_text(encoding="utf-8").strip()
    task: Task = {
        "id": folder.relative_to(top).as_posix(),
        "instruction": text,
        "folder": str(folder),
        "root": str(top),
    }
    metadata = settings.get("metadata", {})
    return task | {field: metadata[field]} if field in metadata else task


def read_setup(folder: Path, settings: Mapping[str, Any]) -> Setup:
    """Return what the environment of a task does. Raises NeedsDocker if it does more."""
    environment = settings.get("environment", {})
    source = folder / "environment"
    if "steps" in settings:
        raise NeedsDocker("has_steps")
    if settings.get("verifier", {}).get("environment_mode", "shared") != "shared":
        raise NeedsDocker("has_separate_verifier")
    if environment.get("os", "linux") != "linux":
        raise NeedsDocker("other_system")
    if environment.get("mcp_servers") or environment.get("gpus"):
        raise NeedsDocker("needs_services")
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (source / name).exists():
            raise NeedsDocker(NEEDS_DOCKER)
    dockerfile = source / "Dockerfile"
    if dockerfile.exists():
        return _read_dockerfile(dockerfile.read_text(encoding="utf-8"))
    if "docker_image" in environment:
        raise NeedsDocker(NEEDS_DOCKER)
    return Setup(WORK, ((".", "."),), {})


def place_files(folder: Path, setup: Setup, box: Box) -> None:
    """Copy the files to start from into the working directory of a box."""
    source = folder / "environment"
    for name, target in setup.copies:
        path, goal = source / name, box.work / target
        if path.is_dir():
            skip = shutil.ignore_patterns("Dockerfile", ".dockerignore")
            shutil.copytree(path, goal, symlinks=True, dirs_exist_ok=True, ignore=skip)
        elif path.is_file():
            goal = goal / path.name if target.endswith("/") or goal.is_dir() else goal
            goal.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, goal)


def _task_folders(top: Path) -> list[Path]:
    folders = sorted(path.parent for path in top.glob("*/task.toml"))
    if not folders:
        raise UserError.empty(
            str(top), f"{top} has no folder with a task.toml; expected one for each task."
        )
    return folders


def read_settings(folder: Path) -> dict[str, Any]:
    path = folder / "task.toml"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError.malformed(
            str(path), f"{path} is not readable ({error}); correct it."
        ) from error


def _read_dockerfile(text: str) -> Setup:
    """Return what a Dockerfile does if it has only FROM, WORKDIR, ENV and COPY of local files."""
    workdir, copies, variables = WORK, [], {}
    lines = re.sub(r"\\\r?\n", " ", text).splitlines()
    for line in lines:
        name, _, rest = line.strip().partition(" ")
        match name.upper():
            case "" | "FROM" | "LABEL" | "MAINTAINER" | "CMD" | "ENTRYPOINT" | "EXPOSE":
                continue
            case "WORKDIR":
                workdir = rest.strip().rstrip("/")
            case "ENV" if "=" in rest:
                variables |= dict(word.split("=", 1) for word in shlex.split(rest) if "=" in word)
            case "COPY" | "ADD":
                copies.append(shlex.split(rest))
            case _ if not name.startswith("#"):
                raise NeedsDocker(NEEDS_DOCKER)  # such as RUN
    if not re.fullmatch(r"/\w[\w.-]*", workdir) or workdir[1:] in TAKEN:
        raise NeedsDocker(NEEDS_DOCKER)
    return Setup(workdir, tuple(c for words in copies for c in _copies(words, workdir)), variables)


def _copies(words: list[str], workdir: str) -> list[tuple[str, str]]:
    """Return (source, path in the working directory) for each source of a COPY."""
    *sources, target = [word for word in words if not re.match("--ch(own|mod)=", word)] or [""]
    inside = os.path.relpath(os.path.join(workdir, target), workdir)
    escapes = any(os.path.normpath(s).startswith(("..", "/")) or "://" in s for s in sources)
    if not sources or escapes or inside.startswith("..") or any("--" in s[:2] for s in sources):
        raise NeedsDocker(NEEDS_DOCKER)
    is_folder = target.endswith("/") or len(sources) > 1
    return [(source, inside + "/" if is_folder else inside) for source in sources]
