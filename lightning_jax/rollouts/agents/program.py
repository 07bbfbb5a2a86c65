"""Agents that are programs, wrapped as coroutine functions like any other agent.

A command is started once for each rollout. It finds the policy's URL in its environment and the
task on its standard input, as far as `visibility.py` lets it. The reward is the last line of its
output, or the result of a function of the whole output. A function for another interpreter runs in
a process of that interpreter. docs/agents.md describes the input of a program and its exit codes.
"""

import asyncio
import inspect
import json
import logging
import os
import re
import signal
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning_jax.rollouts.agents.functions import Agent, Result, load_agent
from lightning_jax.rollouts.agents.process import ProgramEnd, ProgramLimits, run_program
from lightning_jax.rollouts.agents.visibility import (
    REPORT_FD,
    is_judged,
    program_environment,
    report_channel,
    task_variable,
    visible_llm,
    visible_task,
)
from lightning_jax.rollouts.config import AgentConfig, require_agent
from lightning_jax.settings import ConfigError
from lightning_jax.settings.loading import find_program, load_function
from lightning_jax.system.descriptors import original_limit
from lightning_jax.system.network import with_direct_host
from lightning_jax.types import LLM, Task

log = logging.getLogger(__name__)

CHILD = Path(__file__).with_name("child.py")
MAX_RESULT = 2**20  # bytes
TEMPORARY_FAILURE = 75  # EX_TEMPFAIL of sysexits.h: a service that the program needs is down
# Variables that programs inherit: those that locate files, interpreters and the network. Others may
# be secrets. So may proxies, but the network is not reachable without them.
INHERITED = re.compile(
    "PATH|HOME|USER|LOGNAME|SHELL|PWD|LANG|LANGUAGE|LC_[A-Z]+|TZ|TERM|TMPDIR|TEMP|TMP|XDG_[A-Z_]+"
    "|PYTHON[A-Z_]*|VIRTUAL_ENV|CONDA_PREFIX|CONDA_DEFAULT_ENV|PYENV_[A-Z_]+|JAVA_HOME|GOPATH"
    "|NODE_PATH|NODE_OPTIONS|NODE_EXTRA_CA_CERTS|NVM_[A-Z_]+|GEM_[A-Z]+"
    "|(DY)?LD_[A-Z_]+|OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES|HF_HOME|HF_HUB_CACHE|HF_HUB_OFFLINE"
    "|SSL_CERT_FILE|SSL_CERT_DIR|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE"
    "|(HTTPS?|FTP|ALL|NO)_PROXY|(https?|ftp|all|no)_proxy"
)
LOAD_TIMEOUT_S = 120.0  # for the other interpreter to import the agent's framework


class ExitStatus(Exception):
    """Non-zero exit status of the program."""


class KilledBySignal(Exception):
    """Death of the program by a signal that we did not send."""


class OverLimit(Exception):
    """Termination of the program because it exceeded a limit of its settings."""


class TemporaryFailure(ConnectionError):
    """Report by the program that a service it needs is down."""


class NotStarted(ConnectionError):
    """Temporary failure of the system to start the program."""


def make_agent(config: AgentConfig) -> Agent:
    """Return the agent that the settings name. Raises ConfigError if something is missing."""
    require_agent(config)
    if config.command is not None:
        return _command_agent(config)
    assert config.function is not None
    if config.python is not None:
        return _interpreter_agent(config.python, config.function, config)
    return load_agent(config.function, config.options)


def inherited(extra: Sequence[str]) -> dict[str, str]:
    """Return the variables that programs inherit from this process, plus those of `agent.env`."""
    entries = (entry.partition("=") for entry in extra)
    added = {name: value if is_set else os.environ.get(name) for name, is_set, value in entries}
    passed = {name: value for name, value in os.environ.items() if INHERITED.fullmatch(name)}
    return passed | {name: value for name, value in added.items() if value is not None}


def _command_agent(config: AgentConfig) -> Agent:
    command: tuple[str, ...] = config.command
    words = (find_program(command[0], "agent.command"), *command[1:])
    start = _starter(config)
    reward = load_function(config.reward) if config.reward else None
    logged: set[frozenset[str]] = set()

    async def agent(task: Task, llm: LLM) -> Result:
        visible, environment = visible_task(task, config, llm), {}
        if is_judged(config, llm) and (names := frozenset(map(str, visible))) not in logged:
            logged.add(names)
            log.info(
                "the program gets the fields %s of a task, of %s; agent.task_fields names those "
                "that it gets",
                ", ".join(sorted(names)),
                ", ".join(sorted(map(str, task))),
                extra={"event": "fields_shown", "fields": sorted(names)},
            )
        with ExitStack() as at_end:
            kept: tuple[int, ...] = ()
            if config.posts == "own":
                kept = (at_end.enter_context(report_channel(llm)),)
                environment = {REPORT_FD: str(kept[0])}
            end = await start(words, visible, llm, environment | task_variable(visible), kept)
        _check_end(end, config)
        if reward is None:
            return _last_line(end.output)
        # In a thread, because it may run tests or call a judge model for seconds.
        result = await asyncio.to_thread(reward, dict(task), end.output)
        return await result if inspect.isawaitable(result) else result

    return agent


def _interpreter_agent(python: str, function: str, config: AgentConfig) -> Agent:
    words = (find_program(python, "agent.python"), str(CHILD), function)
    _check_loads(words, inherited(config.env), config.options)
    start = _starter(config)

    async def agent(task: Task, llm: LLM) -> Result:
        # What the function's tools inherit has neither the task nor the rollout's own URL.
        with tempfile.TemporaryFile() as channel, report_channel(llm) as reports:
            kept = (channel.fileno(), reports)
            end = await start((*words, str(kept[0])), task, llm, {REPORT_FD: str(reports)}, kept)
            report = os.pread(channel.fileno(), MAX_RESULT, 0)
        if not report:
            _check_end(end, config)
            return None
        return _result_of(report, has_limit=config.memory_mib is not None)

    return agent


def _check_loads(
    words: tuple[str, ...], environment: Mapping[str, str], options: Mapping[str, Any]
) -> None:
    """Load the agent once, so that a missing framework fails before the run."""
    what = f"agent.function {words[-1]!r} cannot be used with agent.python {words[0]}"
    nobody = LLM("http://localhost/v1", "none", "none")
    variables = program_environment(nobody, environment, options)
    loading = asyncio.wait_for(run_program(words, variables, b""), LOAD_TIMEOUT_S)
    try:
        with ThreadPoolExecutor(1) as pool:  # because this thread may run an event loop
            tried = pool.submit(asyncio.run, loading).result()
    except TimeoutError:
        raise ConfigError(
            f"{what}: loading took longer than {LOAD_TIMEOUT_S:g} s.",
            reason="timeout",
            key="agent.python",
        ) from None
    if tried.status != 0:
        raise ConfigError(
            f"{what}: {last_words(tried.errors)}",
            reason="not_loaded",
            key="agent.python",
        )


def _starter(config: AgentConfig) -> Callable[..., Awaitable[ProgramEnd]]:
    """Return a function that runs a command line, with a task on its standard input."""
    limits = ProgramLimits(
        max_processes=config.max_processes,
        memory_bytes=int((config.memory_mib or 0) * 2**20),
        num_files=original_limit(),
    )
    outer, directory = inherited(config.env), os.getcwd()  # an agent's function may change it

    async def start(
        words: tuple[str, ...],
        task: Task,
        llm: LLM,
        variables: Mapping[str, str],
        keep_open: tuple[int, ...],
    ) -> ProgramEnd:
        of_rollout = program_environment(visible_llm(config, llm), outer, config.options)
        environment = with_direct_host({**of_rollout, **variables}, llm.base_url)
        stdin = json.dumps(task).encode()
        try:
            return await run_program(words, environment, stdin, keep_open, limits, directory)
        except OSError as error:  # such as no memory or descriptors; the file existed before
            raise NotStarted(f"{words[0]} could not be started: {error}") from error

    return start


def _check_end(end: ProgramEnd, config: AgentConfig) -> None:
    """Raise an error if the program failed or exceeded a limit."""
    if end.exceeded is not None:
        value = getattr(config, end.exceeded)
        raise OverLimit(f"the program used more than agent.{end.exceeded}={value}")
    check_status(end)


def check_status(end: ProgramEnd) -> None:
    """Raise an error unless the program ended with status 0.

    The message is the last line of its standard error, or of its output if that has none.
    """
    words = last_words(end.errors if end.errors.strip() else end.output)
    if end.status == TEMPORARY_FAILURE:
        raise TemporaryFailure(words)
    if end.status > 0:
        raise ExitStatus(f"exit status {end.status}: {words}")
    if end.status < 0:
        raise KilledBySignal(f"killed by {_signal_name(-end.status)}: {words}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def last_words(text: str) -> str:
    """Return the last line of what a program wrote."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][-400:] if lines else "it wrote nothing"


def _last_line(output: str) -> Any:
    """Return the last non-empty line, decoded as JSON if possible, or None if there is none."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if not lines:
        return None
    try:
        return json.loads(lines[-1])
    except ValueError:
        return lines[-1]


def _result_of(text: bytes, *, has_limit: bool) -> Any:
    """Return the agent's result from another process, or raise its error again.

    `has_limit` is True if the process had a limit of memory.
    """
    try:
        report = json.loads(text)
    except ValueError:
        raise ExitStatus(f"its result is truncated or longer than {MAX_RESULT} bytes") from None
    if "result" in report:
        return report["result"]
    base = ConnectionError if report["is_connection"] else Exception
    if report["error"] == "MemoryError" and not has_limit:  # the machine's memory ran out
        base = MemoryError
    if report["error"] == "RuntimeError":  # perhaps no thread was left
        base = RuntimeError
    address = next((address for address in report["addresses"] if address), None)
    raise type(report["error"], (base,), {"lightning_address": address})(report["message"])
