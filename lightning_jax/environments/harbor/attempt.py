"""Attempts at Harbor tasks: a command-line agent, then the test script and its reward."""

import json
import logging
import math
import os
import re
import shlex
import shutil
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from lightning_jax.environments.docker import open_container
from lightning_jax.environments.harbor.folders import place_files, read_settings, read_setup
from lightning_jax.environments.sandbox import (
    LOGS,
    TEST_HOME,
    TESTS,
    WORK,
    Box,
    BoxLimits,
    choose_kind,
    open_box,
    run_boxed,
)
from lightning_jax.errors import UserError
from lightning_jax.rollouts.agents.process import ProgramEnd
from lightning_jax.rollouts.agents.program import OverLimit, check_status, inherited, last_words
from lightning_jax.rollouts.agents.visibility import program_environment, task_variable
from lightning_jax.settings.loading import find_program
from lightning_jax.system.network import with_direct_host
from lightning_jax.system.trees import remove_tree
from lightning_jax.types import LLM, Task

log = logging.getLogger(__name__)

MAX_REWARD_FILE = 2**16  # bytes


class TestFailure(Exception):
    """End of the test script without a reward."""

    __test__ = False  # no test of pytest


async def run(  # noqa: PLR0913  (each is a setting)
    task: Task,
    llm: LLM,
    *,
    command: str | list[str],
    programs: dict[str, str] | None = None,
    sandbox: str = "auto",
    env: list[str] | None = None,
    agent_timeout_s: float = 120.0,
    test_timeout_s: float = 60.0,
    limits: dict[str, int] | None = None,
) -> dict[str, Any]:
    """Run a command-line agent on a task, then the task's test script. Return its reward.

    `sandbox` is auto, namespaces, processes, or docker, for the command in the task's image.
    `programs` names the programs that the command itself starts, each with the command that
    installs it.
    The word `{instruction}` of the command stands for the instruction, which is also on standard
    input, in JSON. `env` is as `agent.env`. `limits` has max_processes, memory_mib and disk_mib.
    Time limits of the task apply if they are shorter. The tests run after the agent's time is over,
    too. Raises TestFailure if they write no reward.
    """
    folder = Path(task["folder"])
    settings = read_settings(folder)
    agent_limits = _limits(min(agent_timeout_s, _seconds(settings, "agent", math.inf)), limits)
    test_limits = _limits(min(test_timeout_s, _seconds(settings, "verifier", 600.0)), limits)
    task_of_agent = {"id": task["id"], "instruction": task["instruction"]}
    if sandbox == "docker":
        names = {entry.partition("=")[0] for entry in env or ()}
        outer = {name: value for name, value in inherited(env or ()).items() if name in names}
        program = _program(_words(command), task_of_agent, llm, outer)
        return await _run_in_docker(folder, settings, program, agent_limits, test_limits)
    kind, setup = choose_kind(sandbox), read_setup(folder, settings)
    words, outer = _command(command), inherited(env or ())
    paths = [*words, *_find_programs(programs or {})]
    visible = [_directory_of(path) for path in paths if os.path.isfile(path)]
    visible += [path for path in outer.get("PYTHONPATH", "").split(os.pathsep) if path]
    with open_box(kind, setup.workdir, visible, [task["root"]], setup.variables) as box:
        place_files(folder, setup, box)
        task_of_agent["instruction"] = _located(task["instruction"], box)
        program = _program(words, task_of_agent, llm, outer)
        end = await run_boxed(box, *program, agent_limits)
        _check_agent(end)
        rewards = await run_tests(folder, box, settings, test_limits)
    return rewards | {"agent_in_time": float(end.exceeded is None)}


def check_options(
    *,
    command: str | list[str],
    programs: dict[str, str] | None = None,
    sandbox: str = "auto",
    limits: dict[str, int] | None = None,
    **others: Any,
) -> None:
    """Raise UserError if `run` cannot start an agent with these options."""
    _limits(0.0, limits)
    _words(command)
    if sandbox != "docker":  # its image has the programs
        choose_kind(sandbox)
        _find_programs(programs or {})
        _command(command)


run.check_options = check_options  # type: ignore[attr-defined]  # before the run


class _Program(NamedTuple):
    """Agent's command line with its variables and its standard input."""

    words: list[str]
    variables: dict[str, str]
    stdin: bytes


def _program(words: list[str], task: Task, llm: LLM, outer: Mapping[str, str]) -> _Program:
    """Return an agent for a task. Rewards and spans that it posts do not count: tests judge."""
    variables = {**program_environment(llm.calls_only(), outer), **task_variable(task)}
    return _Program(
        [word.replace("{instruction}", task["instruction"]) for word in words],
        with_direct_host(variables, llm.base_url),
        json.dumps(task).encode(),
    )


async def _run_in_docker(
    folder: Path,
    settings: Mapping[str, Any],
    program: _Program,
    agent_limits: BoxLimits,
    test_limits: BoxLimits,
) -> dict[str, Any]:
    """Run the agent and the tests in a container of the task's image."""
    async with open_container(folder, settings, agent_limits) as container:
        end = await container.run(*program, agent_limits.timeout_s)
        _check_agent(end)
        await container.end_processes()
        await container.put(folder / "tests", TESTS)
        place = Path(tempfile.mkdtemp())
        try:
            for name in ("home", "logs", "logs/verifier"):  # for any user of the image
                (place / name).mkdir()
                (place / name).chmod(0o777)
            await container.put(place / "home", TEST_HOME)
            await container.put(place / "logs", LOGS)
            script = ["bash", f"{TESTS}/test.sh"]
            variables = {**_test_variables(settings), "HOME": TEST_HOME}
            tested = await container.run(script, variables, b"", test_limits.timeout_s)
            await container.get(f"{LOGS}/verifier", place / "logs/verifier")
            rewards = _reward_of(tested, test_limits, place / "logs/verifier")
        finally:
            remove_tree(place)
    return rewards | {"agent_in_time": float(end.exceeded is None)}


async def run_tests(
    folder: Path, box: Box, settings: Mapping[str, Any], limits: BoxLimits
) -> dict[str, Any]:
    """Run the test script in a box, and return what it wrote, a `reward` and others.

    Raises TestFailure if there are none.
    """
    for directory in (box.tests, box.logs):  # whatever the agent left there
        remove_tree(directory)
    shutil.copytree(folder / "tests", box.tests, symlinks=True)
    (box.logs / "verifier").mkdir(parents=True)
    if box.kind == "processes":
        _rewrite_paths(box)
    variables = inherited(()) | _test_variables(settings)
    script = f"{box.path_of(TESTS)}/test.sh"
    end = await run_boxed(box, ["bash", script], variables, b"", limits, with_tests=True)
    return _reward_of(end, limits, box.logs / "verifier")


def _reward_of(end: ProgramEnd, limits: BoxLimits, folder: Path) -> dict[str, Any]:
    """Return what the test script wrote. Raises TestFailure if that is no reward."""
    if end.exceeded is not None:
        limit = f"{end.exceeded}={getattr(limits, end.exceeded, '')}"
        raise TestFailure(f"the test script used more than {limit}")
    rewards = read_reward(folder)
    if rewards is None:
        raise TestFailure(
            f"the test script wrote no reward and ended with {end.status}: {last_words(end.errors)}"
        )
    return rewards


def _test_variables(settings: Mapping[str, Any]) -> dict[str, str]:
    variables = settings.get("verifier", {}).get("env", {})
    return {name: str(value) for name, value in variables.items()}


def read_reward(folder: Path) -> dict[str, Any] | None:
    """Return what is in reward.json or reward.txt, with a finite number named `reward`, or None.

    Several numbers without that name are averaged. Links are not followed.
    """
    if os.path.lexists(folder / "reward.json"):
        try:
            rewards = json.loads(_read_plain(folder / "reward.json") or "")
        except (ValueError, RecursionError):
            return None
        if not isinstance(rewards, dict) or not rewards:
            return None
        counted = [rewards["reward"]] if "reward" in rewards else list(rewards.values())
        if not all(type(value) in (int, float, bool) for value in counted):
            return None
        try:
            reward = math.fsum(map(float, counted)) / len(counted)
        except OverflowError:
            return None
        return {**rewards, "reward": reward} if math.isfinite(reward) else None
    text = _read_plain(folder / "reward.txt")
    try:
        value = float(text or "")
    except ValueError:
        return None
    return {"reward": value} if math.isfinite(value) else None


def _command(command: str | list[str]) -> list[str]:
    """Return the words of a command line. Those that name files here become absolute."""
    words = _words(command)
    first = os.path.abspath(find_program(words[0], "agent.options.command"))
    return [first, *(os.path.abspath(w) if os.path.isfile(w) else w for w in words[1:])]


def _find_programs(programs: Mapping[str, str]) -> list[str]:
    """Return the paths of programs on the PATH, with those that links lead to."""
    paths = {name: shutil.which(name) for name in programs}
    for name, path in paths.items():
        if path is None:
            raise UserError.not_installed(
                name, f"{name} is not installed; run {programs[name]} (agent.options.programs)."
            )
    return [other for path in paths.values() if path for other in (path, os.path.realpath(path))]


def _words(command: str | list[str]) -> list[str]:
    words = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
    if not words:
        raise UserError.missing(
            "agent.options.command", "agent.options.command is empty; expected a command line."
        )
    return words


def _directory_of(program: str) -> str:
    """Return the directory of a file, or the environment whose bin has it."""
    parent = Path(program).parent
    return str(parent.parent if parent.name in ("bin", ".bin") else parent)  # .bin is npm's


def _limits(timeout_s: float, limits: Mapping[str, int] | None) -> BoxLimits:
    names = {"max_processes", "memory_mib", "disk_mib"}
    if unknown := {*(limits or {})} - names:
        raise UserError.unknown(
            "agent.options.limits",
            f"agent.options.limits has {', '.join(sorted(unknown))}; expected "
            f"{', '.join(sorted(names))}.",
        )
    return replace(BoxLimits(timeout_s), **(limits or {}))


def _check_agent(end: ProgramEnd) -> None:
    """Raise an error if the agent failed by something other than its time."""
    if end.exceeded == "timeout_s":
        return
    if end.exceeded is not None:
        raise OverLimit(f"the agent used more than agent.options.limits.{end.exceeded}")
    check_status(end)


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
    return re.sub(rf"(?<![\w./-])({pattern})(?![\w-])", lambda match: names[match[1]], text)


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
