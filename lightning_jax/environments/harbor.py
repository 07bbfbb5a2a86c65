"""Tasks in Harbor's folders: an instruction, files to start from, and a test script.

`load` is a loader for `data.load`. `run` is an agent for `agent.function`: it starts a command-line
agent in a copy of the files, then the test script, and returns the reward that the script wrote.
docs/howto/harbor_tasks.md says what the sandbox contains and what it does not.
"""

import json
import logging
import math
import os
import random
import re
import shlex
import shutil
import stat
import tempfile
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_jax.environments.docker import open_container
from lightning_jax.environments.sandbox import (
    LOGS,
    TESTS,
    WORK,
    Box,
    BoxLimits,
    choose_kind,
    open_box,
    run_boxed,
)
from lightning_jax.errors import UserError
from lightning_jax.loading import find_program
from lightning_jax.rollouts.process import Ended
from lightning_jax.rollouts.program import (
    TEMPORARY_FAILURE,
    ExitStatus,
    KilledBySignal,
    OverLimit,
    TemporaryFailure,
    inherited,
    program_environment,
)
from lightning_jax.types import LLM, Task

log = logging.getLogger(__name__)

DEV_SHARE = 0.2  # share of a folder without train and dev
NEEDS_DOCKER = "needs_docker"  # reason of tasks that an image can serve
MAX_REWARD_FILE = 2**16  # bytes
# Directories that a container has and that a working directory cannot be here.
TAKEN = {
    *("bin", "boot", "dev", "etc", "home", "lib", "lib32", "lib64", "logs", "media", "mnt", "opt"),
    *("proc", "root", "run", "sbin", "solution", "srv", "sys", "tests", "tmp", "usr", "var"),
}


class TestFailure(Exception):
    """End of the test script without a reward."""

    __test__ = False  # no test of pytest


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
        raise UserError(
            f"data.root is {root!r}; expected a folder of Harbor tasks.",
            reason="not_found",
            key="data.root",
        )
    top = Path(root).resolve()
    parts = (top / "train", top / "dev")
    is_split = all(part.is_dir() and not (part / "task.toml").exists() for part in parts)
    tasks, left_out = read_tasks(top / split if is_split else top, top, field, docker)
    if not is_split:
        number = min(max(1, int(DEV_SHARE * len(tasks))), len(tasks))
        dev = set(random.Random(0).sample(range(len(tasks)), number))
        tasks = [task for i, task in enumerate(tasks) if (i in dev) == (split == "dev")]
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
    settings = _settings(folder)
    try:
        read_setup(folder, settings)
    except NeedsDocker as reason:
        if not docker or str(reason) != NEEDS_DOCKER:
            raise
    for name in ("instruction.md", "tests/test.sh"):
        if not (folder / name).is_file():
            raise UserError(
                f"{folder} has no {name}; add it.", reason="missing", key=str(folder / name)
            )
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


async def run(
    task: Task,
    llm: LLM,
    *,
    command: str | list[str],
    sandbox: str = "auto",
    env: list[str] | None = None,
    agent_timeout_s: float = 120.0,
    test_timeout_s: float = 60.0,
    limits: dict[str, int] | None = None,
) -> dict[str, float]:
    """Run a command-line agent on a task, then the task's test script. Return its reward.

    `sandbox` is auto, namespaces, processes, or docker, for the command in the task's image.

    The word `{instruction}` of the command stands for the instruction, which is also on standard
    input, in JSON. `env` is as `agent.env`. `limits` has max_processes, memory_mib and disk_mib.
    Time limits of the task apply if they are shorter. The tests run after the agent's time is over,
    too. Raises TestFailure if they write no reward.
    """
    folder = Path(task["folder"])
    settings = _settings(folder)
    agent_limits = _limits(min(agent_timeout_s, _seconds(settings, "agent", math.inf)), limits)
    test_limits = _limits(min(test_timeout_s, _seconds(settings, "verifier", 600.0)), limits)
    start = _Start(task, llm, command, tuple(env or ()))
    if sandbox == "docker":
        return await _run_in_docker(folder, settings, start, agent_limits, test_limits)
    kind, setup = choose_kind(sandbox), read_setup(folder, settings)
    words, outer = _command(command), inherited(env or ())
    visible = [_directory_of(word) for word in words if os.path.isfile(word)]
    visible += [path for path in outer.get("PYTHONPATH", "").split(os.pathsep) if path]
    with open_box(kind, setup.workdir, visible, [task["root"]], setup.variables) as box:
        place_files(folder, setup, box)
        known = start.known(_located(task["instruction"], box))
        variables = {**outer, **program_environment(known, llm)}
        ended = await run_boxed(
            box, _filled(words, known), variables, json.dumps(known).encode(), agent_limits
        )
        _check_agent(ended)
        found = await run_tests(folder, box, settings, test_limits)
    return found | {"agent_in_time": float(ended.exceeded is None)}


@dataclass(frozen=True)
class _Start:
    """How the agent of an attempt is started."""

    task: Task
    llm: LLM
    command: str | list[str]
    env: tuple[str, ...]

    def known(self, instruction: str) -> Task:
        """Return what the agent gets of its task."""
        return {"id": self.task["id"], "instruction": instruction}


async def _run_in_docker(
    folder: Path,
    settings: Mapping[str, Any],
    start: _Start,
    agent_limits: BoxLimits,
    test_limits: BoxLimits,
) -> dict[str, float]:
    """Run the agent and the tests in a container of the task's image."""
    known = start.known(start.task["instruction"])
    variables = program_environment(known, start.llm) | _chosen(start.env)
    words = _filled(_words(start.command), known)
    stdin = json.dumps(known).encode()
    async with open_container(folder, settings, agent_limits) as container:
        ended = await container.run(words, variables, agent_limits.timeout_s, stdin)
        _check_agent(ended)
        await container.end_processes()
        await container.put(folder / "tests", TESTS)
        with tempfile.TemporaryDirectory() as place:
            (Path(place) / "verifier").mkdir()
            await container.put(Path(place), LOGS)
            script = ["bash", f"{TESTS}/test.sh"]
            tested = await container.run(script, _test_variables(settings), test_limits.timeout_s)
            await container.get(f"{LOGS}/verifier", Path(place) / "verifier")
            found = _reward_of(tested, test_limits, Path(place) / "verifier")
    return found | {"agent_in_time": float(ended.exceeded is None)}


async def run_tests(
    folder: Path, box: Box, settings: Mapping[str, Any], limits: BoxLimits
) -> dict[str, float]:
    """Run the test script in a box, and return the numbers that it wrote as `reward` and others.

    Raises TestFailure if there are none.
    """
    for directory in (box.tests, box.logs):  # whatever the agent left there
        shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(folder / "tests", box.tests, symlinks=True)
    (box.logs / "verifier").mkdir(parents=True)
    if box.kind == "processes":
        _rewrite_paths(box)
    variables = inherited(()) | _test_variables(settings)
    script = f"{box.path_of(TESTS)}/test.sh"
    ended = await run_boxed(box, ["bash", script], variables, b"", limits, with_tests=True)
    return _reward_of(ended, limits, box.logs / "verifier")


def _reward_of(ended: Ended, limits: BoxLimits, folder: Path) -> dict[str, float]:
    """Return what the test script wrote. Raises TestFailure if that is no reward."""
    if ended.exceeded is not None:
        raise TestFailure(f"the test script used more than {_limit(ended, limits)}")
    found = read_reward(folder)
    if found is None:
        raise TestFailure(
            f"the test script wrote no reward and ended with {ended.status}: {_last(ended.errors)}"
        )
    return found


def _test_variables(settings: Mapping[str, Any]) -> dict[str, str]:
    given = settings.get("verifier", {}).get("env", {})
    return {name: str(value) for name, value in given.items()}


def read_reward(folder: Path) -> dict[str, float] | None:
    """Return the numbers in reward.json or reward.txt, with one named `reward`, or None.

    Several numbers without that name are averaged. Links are not followed.
    """
    if os.path.lexists(folder / "reward.json"):
        try:
            found = json.loads(_read_plain(folder / "reward.json") or "")
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict) or not found:
            return None
        if not all(type(value) in (int, float, bool) for value in found.values()):
            return None
        numbers = {name: float(value) for name, value in found.items()}
        numbers.setdefault("reward", math.fsum(numbers.values()) / len(numbers))
        return numbers if all(map(math.isfinite, numbers.values())) else None
    text = _read_plain(folder / "reward.txt")
    try:
        value = float(text or "")
    except ValueError:
        return None
    return {"reward": value} if math.isfinite(value) else None


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
    found = sorted(path.parent for path in top.glob("*/task.toml"))
    if not found:
        raise UserError(
            f"{top} has no folder with a task.toml; expected one for each task.",
            reason="empty",
            key=str(top),
        )
    return found


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "task.toml"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} is not readable ({error}); correct it.", reason="malformed", key=str(path)
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


def _command(command: str | list[str]) -> list[str]:
    """Return the words of a command line. Those that name files here become absolute."""
    words = _words(command)
    first = os.path.abspath(find_program(words[0], "agent.options.command"))
    return [first, *(os.path.abspath(w) if os.path.isfile(w) else w for w in words[1:])]


def _words(command: str | list[str]) -> list[str]:
    words = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
    if not words:
        raise UserError(
            "agent.options.command is empty; expected a command line.",
            reason="missing",
            key="agent.options.command",
        )
    return words


def _filled(words: list[str], known: Task) -> list[str]:
    return [word.replace("{instruction}", known["instruction"]) for word in words]


def _chosen(env: Sequence[str]) -> dict[str, str]:
    """Return only the variables that `env` names."""
    names = {entry.partition("=")[0] for entry in env}
    return {name: value for name, value in inherited(env).items() if name in names}


def _directory_of(program: str) -> str:
    """Return the directory of a file, or the environment whose bin has it."""
    parent = Path(program).parent
    return str(parent.parent if parent.name == "bin" else parent)


def _limits(timeout_s: float, given: Mapping[str, int] | None) -> BoxLimits:
    names = {"max_processes", "memory_mib", "disk_mib"}
    if unknown := {*(given or {})} - names:
        raise UserError(
            f"agent.options.limits has {', '.join(sorted(unknown))}; expected "
            f"{', '.join(sorted(names))}.",
            reason="unknown",
            key="agent.options.limits",
        )
    return replace(BoxLimits(timeout_s), **(given or {}))


def _check_agent(ended: Ended) -> None:
    """Raise an error if the agent failed by something other than its time."""
    if ended.exceeded == "timeout_s":
        return
    if ended.exceeded is not None:
        raise OverLimit(f"the agent used more than agent.options.limits.{ended.exceeded}")
    if ended.status == TEMPORARY_FAILURE:
        raise TemporaryFailure(_last(ended.errors))
    if ended.status > 0:
        raise ExitStatus(f"exit status {ended.status}: {_last(ended.errors)}")
    if ended.status < 0:
        raise KilledBySignal(f"killed by signal {-ended.status}: {_last(ended.errors)}")


def _limit(ended: Ended, limits: BoxLimits) -> str:
    return f"{ended.exceeded}={getattr(limits, ended.exceeded or '', '')}"


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][-400:] if lines else "no output on standard error"


def _seconds(settings: Mapping[str, Any], section: str, default: float) -> float:
    value = settings.get(section, {}).get("timeout_sec", default)
    return float(value) if isinstance(value, int | float) and value > 0 else default


def _located(text: str, box: Box) -> str:
    """Return a text with the paths of /app, /tests and /logs as they are in the box."""
    if box.kind == "namespaces":
        return text
    names = {path: box.path_of(path) for path in (WORK, TESTS, LOGS)} | {
        box.workdir: box.path_of(WORK)
    }
    pattern = "|".join(map(re.escape, names))
    return re.sub(rf"(?<![\w./-])({pattern})(?![\w-])", lambda found: names[found[1]], text)


def _rewrite_paths(box: Box) -> None:
    """Let the files of the tests name the box's directories, as no other file system is mounted."""
    for path in box.tests.rglob("*"):
        text = None if path.is_symlink() else _read_plain(path)
        if text is not None and (located := _located(text, box)) != text:
            path.write_text(located, encoding="utf-8")


def _read_plain(path: Path) -> str | None:
    """Return the text of a short, regular file, or None. Programs may have put anything there."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_REWARD_FILE:
            return None
        try:
            return file.read(MAX_REWARD_FILE).decode()
        except UnicodeDecodeError:
            return None
