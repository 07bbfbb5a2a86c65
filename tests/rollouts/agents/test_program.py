"""Tests of agents that are programs: one status each, and no process outlives the program."""

import asyncio
import json
import os
import resource
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from coded import raises_coded
from log_events import records
from served_runs import SERVE, TASKS, TOY, model_and_engine

from lightning_jax.rollouts.agents import process, program
from lightning_jax.rollouts.agents.functions import Agent, load_agent
from lightning_jax.rollouts.agents.process import MAX_OUTPUT, run_program
from lightning_jax.rollouts.agents.program import inherited, make_agent
from lightning_jax.rollouts.agents.visibility import program_environment, task_variable
from lightning_jax.rollouts.config import MAX_VARIABLE, AgentConfig, RolloutConfig
from lightning_jax.rollouts.runner import Runner, make_requests, run_requests
from lightning_jax.rollouts.workers.work import LeasedWork
from lightning_jax.settings import ConfigError
from lightning_jax.system.descriptors import original_limit, raise_limit
from lightning_jax.testing.service import run_service
from lightning_jax.types import LLM, Rollout

linux = pytest.mark.skipif(sys.platform != "linux", reason="its kernel shows the tree")
URL = LLM("http://127.0.0.1:1/rollout/r~t/v1", "key", "policy")


def shell(script: str, **settings: Any) -> Agent:
    return make_agent(AgentConfig(command=["sh", "-c", script], **settings))


@asynccontextmanager
async def running(path: Path, agent: Agent, **settings: Any) -> AsyncIterator[Runner]:
    config = RolloutConfig(
        max_infrastructure_failures=1.0, max_attempts=2, retry_delay_s=0.0, **settings
    )
    async with run_service(path, *model_and_engine(), SERVE) as service:
        yield Runner(agent, service.gateway, config, seed=0)


async def rolled_out(path: Path, agent: Agent, **settings: Any) -> Rollout:
    async with running(path, agent, **settings) as runner:
        (rollout,) = await run_requests(make_requests(TASKS[:1], "train", 0, 1), runner)
    return rollout


def is_running(pid: int) -> bool:
    """Return True if the process runs. A zombie does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def pids_in(path: Path, number: int) -> list[int]:
    """Return the process ids that a program wrote, once all are there."""
    for _ in range(500):
        if path.exists() and len(found := path.read_text().split()) == number:
            return [int(pid) for pid in found]
        await asyncio.sleep(0.01)
    raise AssertionError(f"{path} never held {number} process ids")


async def ended(pids: list[int]) -> None:
    """Wait until none of the processes runs."""
    for _ in range(1000):
        if not any(is_running(pid) for pid in pids):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"some of {pids} run still")


async def test_options_reach_functions_and_programs(tmp_path: Path) -> None:
    file = tmp_path / "sized.py"
    file.write_text("async def run(task, llm, *, size=1):\n    return size + 0.5\n")
    function, options = f"{file}:run", {"size": 3}
    echo = ["sh", "-c", 'echo "$LIGHTNING_OPTIONS" | tr -dc 0-9']
    for config, result in (
        (AgentConfig(function, options=options), 3.5),
        (AgentConfig(function, python=sys.executable, options=options), 3.5),
        (AgentConfig(command=echo, options=options), 3),
    ):
        assert await make_agent(config)({"id": "a"}, URL) == result
    for python, reason, key in (
        (None, "invalid", "agent.options.sizes"),
        (sys.executable, "not_loaded", "agent.python"),
    ):
        with raises_coded(ConfigError, reason, key):
            make_agent(AgentConfig(function, python=python, options={"sizes": 3}))


def test_options_are_read_as_the_types_of_the_function(tmp_path: Path) -> None:
    file = tmp_path / "typed.py"
    text = (
        "def run(task, llm, ask: str, *, sizes: tuple[int, ...] = (), other=None):\n"
        "    return float(len(ask) + sum(sizes) + isinstance(sizes, tuple))\n"
    )
    file.write_text(text)

    def result(**options: Any) -> Any:
        agent = make_agent(AgentConfig(f"{file}:run", options=options))
        return asyncio.run(agent({"id": "a"}, URL))  # type: ignore[arg-type]

    assert result(ask="ab", sizes=[3, "4"], other={}) == 10
    file.write_text("def run(*arguments, **options):\n    return options['ask']\n")
    assert result(ask=0.5) == 0.5
    file.write_text(text)
    for options, key in (
        ({"ask": {"Reply with": "NUMBER"}}, "ask"),  # an unquoted colon in YAML
        ({"ask": "ab", "sizes": [3, "four"]}, "sizes.1"),
        ({}, "ask"),
        ({"ask": "ab", "copy": 1}, "copy"),
    ):
        with raises_coded(ConfigError, "invalid", f"agent.options.{key}"):
            result(**options)


async def test_prompts_reach_functions_and_programs(tmp_path: Path) -> None:
    file = tmp_path / "prompted.py"
    file.write_text("async def run(task, llm):\n    return len(llm.prompts['writer'])\n")
    llm = replace(URL, prompts={"writer": "be brief"})
    echo = ["sh", "-c", 'test "$LIGHTNING_PROMPTS" = \'{"writer": "be brief"}\' && echo 8']
    for config in (
        AgentConfig(f"{file}:run"),
        AgentConfig(f"{file}:run", python=sys.executable),
        AgentConfig(command=echo),
    ):
        assert await make_agent(config)({"id": "a"}, llm) == 8
    with pytest.raises(Exception, match=r"prompts\.writer"):
        await make_agent(AgentConfig(f"{file}:run", python=sys.executable))({"id": "a"}, URL)
    work = LeasedWork("r", {"id": "a"}, llm, 1.0, 1)
    assert LeasedWork.from_json(json.loads(work.to_json())) == work


# ---- Input of a program --------------------------------------------------------------------------


def test_the_environment_names_the_policy_for_each_client() -> None:
    variables = program_environment(URL, {}) | task_variable({"id": "a", "text": "ä"})
    assert variables["OPENAI_BASE_URL"] == "http://127.0.0.1:1/rollout/r~t/v1"
    assert variables["OLLAMA_HOST"] == "http://127.0.0.1:1/rollout/r~t"
    assert variables["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:1/rollout/r~t"
    assert variables["GOOGLE_GEMINI_BASE_URL"] == "http://127.0.0.1:1/rollout/r~t"
    assert variables["GEMINI_API_KEY"] == variables["ANTHROPIC_API_KEY"] == "key"
    assert (variables["OPENAI_API_KEY"], variables["OPENAI_MODEL"]) == ("key", "policy")
    assert json.loads(variables["LIGHTNING_TASK"]) == {"id": "a", "text": "ä"}


@pytest.mark.parametrize("name", ["ENDPOINT", "TRACES_ENDPOINT"])
async def test_an_exporter_of_the_settings_stays(name: str) -> None:
    mine = f"OTEL_EXPORTER_OTLP_{name}=http://127.0.0.1:9"
    script = "env | grep -c ^OTEL_EXPORTER_OTLP.*=http://127.0.0.1:9"
    assert await shell(script, env=(mine,))(TASKS[0], URL) == 1
    ours = "env | grep -c ^OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=http://127.0.0.1:1/rollout/r~t/v1"
    assert await shell(f"{ours}; true", env=(mine,))(TASKS[0], URL) == 0
    assert await shell(ours)(TASKS[0], URL) == 1


@pytest.mark.parametrize("over", [0, 1])
async def test_a_task_too_long_for_a_variable_is_on_standard_input(over: int) -> None:
    empty = len(f"LIGHTNING_TASK={json.dumps({'id': ''})}") + 1  # for the terminating zero byte
    task = {"id": "x" * (MAX_VARIABLE - empty + over)}
    assert ("LIGHTNING_TASK" in task_variable(task)) == (not over)
    agent = shell("test ${LIGHTNING_TASK:+set} && wc -c || wc -c | sed s/^/-/")
    size = len(json.dumps(task))
    assert await agent(task, URL) == (-size if over else size)


async def test_the_task_is_read_and_the_last_line_is_the_result() -> None:
    script = """read task; echo "$task" | grep -q '"question": "0?"' || exit 1
    echo thinking; echo '{"reward": 0.5, "f1": 1}'; echo"""
    assert await shell(script)(TASKS[0], URL) == {"reward": 0.5, "f1": 1}


async def test_a_function_makes_the_reward_of_the_output(tmp_path: Path) -> None:
    path = tmp_path / "score.py"
    path.write_text(
        "def reward(task, output):\n    return {'reward': len(output), 'id': task['id'] == 't0'}\n"
    )
    agent = shell("printf 12345", reward=f"{path}:reward")
    assert await agent(TASKS[0], URL) == {"reward": 5, "id": True}


async def test_a_slow_reward_holds_up_no_other(tmp_path: Path) -> None:
    path = tmp_path / "score.py"
    path.write_text(
        "import threading\n"
        "all_there = threading.Barrier(3)\n"
        "def reward(task, output):\n    return all_there.wait(30) >= 0\n"
        "async def later(task, output):\n    return len(output)\n"
    )
    agent = shell("echo 1", reward=f"{path}:reward")
    assert await asyncio.gather(*(agent(TASKS[0], URL) for _ in range(3))) == [True] * 3
    assert await shell("echo 1", reward=f"{path}:later")(TASKS[0], URL) == 2


# ---- Exit ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "reason", "detail"),
    [
        ("sleep 60", "deadline", "0.3 s"),
        ("echo a >&2; echo last word >&2; exit 3", "ExitStatus", "3: last word"),
        ("echo why; exit 3", "ExitStatus", "3: why"),
        ("exit 4", "ExitStatus", "4"),
        ("kill -SEGV $$", "KilledBySignal", "SIGSEGV"),
        ("printf '\\377\\376' >&2; exit 1", "ExitStatus", "1: \ufffd\ufffd"),
        ("true", "no_reward", "None"),
        ("""echo '{"f1": 1}'""", "no_reward", "f1"),
        ("echo NaN", "bad_reward", "nan"),
        ("echo 1e999", "bad_reward", "inf"),
        ("printf 1%0400d 0", "bad_reward", "1000"),
        ("echo good", "bad_reward", "'good'"),
        ("""echo '{"reward": "good"}'""", "bad_reward", "'good'"),
        ("printf '\\377\\n\\0\\n'", "bad_reward", "'\\x00'"),
    ],
)
async def test_a_programs_fault_is_its_own(
    tmp_path: Path, script: str, reason: str, detail: str
) -> None:
    limit_s = 0.3 if reason == "deadline" else 60.0
    rollout = await rolled_out(
        tmp_path, shell(script), timeout_s=limit_s, agent_failure_reward=-1.0
    )
    assert (rollout.status, rollout.reason) == ("agent_failure", reason)
    assert (rollout.attempt, rollout.reward) == (1, -1.0)
    assert detail in (rollout.detail or "")


async def test_exit_status_75_is_infrastructure(tmp_path: Path) -> None:
    rollout = await rolled_out(tmp_path, shell("echo search is down >&2; exit 75"))
    assert (rollout.status, rollout.attempt) == ("infrastructure_failure", 2)
    assert (rollout.reason, rollout.detail) == ("TemporaryFailure", "search is down")


async def test_a_program_that_is_taken_away_is_infrastructure(tmp_path: Path) -> None:
    program = tmp_path / "agent"
    program.write_text("#!/bin/sh\necho 1\n")
    program.chmod(0o755)
    agent = make_agent(AgentConfig(command=str(program)))
    assert await agent(TASKS[0], URL) == 1
    program.unlink()
    rollout = await rolled_out(tmp_path, agent)
    assert (rollout.status, rollout.reason) == ("infrastructure_failure", "NotStarted")


@pytest.mark.parametrize("command", ["/nowhere/agent 1", "no-such-program", __file__])
def test_a_program_that_is_not_there_is_told_at_the_start(command: str) -> None:
    with raises_coded(ConfigError, "not_found", "agent.command"):
        make_agent(AgentConfig(command=command))


async def test_megabytes_do_not_block_and_only_the_last_are_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    flood = "head -c 8000000 /dev/zero | tr '\\0' x"
    ended = await run_program(
        ["sh", "-c", f"{flood}; {flood} >&2; echo; echo 0.25"], os.environ, b""
    )
    assert len(ended.output) == MAX_OUTPUT and ended.output.endswith("x\n0.25\n")
    assert ended.errors == "x" * process.MAX_ERRORS
    assert [record.num_dropped for record in records(caplog, "output_cut")] == [
        8_000_006 - MAX_OUTPUT,
        8_000_000 - process.MAX_ERRORS,
    ]
    assert await shell(f"{flood}; echo; echo 0.25")(TASKS[0], URL) == 0.25


async def test_a_program_that_reads_nothing_is_not_waited_for() -> None:
    task = {"id": "x" * 1_000_000}
    assert await shell("exec <&-; echo 1")(task, URL) == 1


# ---- Leftover processes --------------------------------------------------------------------------

# A child, a grandchild and a child in its own session. Each writes its process id.
CHILDREN = """sh -c 'echo $$ >> {pids}; sleep 1000 & echo $! >> {pids}; wait' &
setsid sh -c 'echo $$ >> {pids}; exec sleep 1000' &
"""


async def test_at_the_deadline_all_that_it_started_ends(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    agent = shell(CHILDREN.format(pids=pids) + "wait")
    rollout = await rolled_out(tmp_path, agent, timeout_s=1.0)
    assert rollout.reason == "deadline"
    assert [is_running(pid) for pid in await pids_in(pids, 3)] == [False] * 3


async def test_what_ignores_the_first_signal_gets_the_second(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    stubborn = "trap '' TERM; while true; do sleep 0.1; done"
    rollout = asyncio.ensure_future(shell(CHILDREN.format(pids=pids) + stubborn)(TASKS[0], URL))
    all_pids = await pids_in(pids, 3)
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout
    assert not any(is_running(pid) for pid in all_pids)


# A process that leaves its session and clears its environment; its two ancestors exit at once.
ESCAPE = "setsid env -i /bin/sh -c '(/bin/sh -c \"echo \\$\\$ >> {pids}; exec sleep 1000\" &) &'"


@linux
async def test_a_child_that_clears_its_environment_ends_as_well(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    until_there = f"while [ $(wc -l < {pids}) -lt 2 ]; do sleep 0.01; done"
    script = f"touch {pids}; " + f"{ESCAPE.format(pids=pids)}; " * 2 + until_there
    assert await shell(f"{script}; echo 1")(TASKS[0], URL) == 1
    assert [is_running(pid) for pid in await pids_in(pids, 2)] == [False] * 2


async def test_programs_end_with_a_trainer_that_is_killed(tmp_path: Path) -> None:
    pids, trainer = tmp_path / "pids", tmp_path / "trainer.py"
    trainer.write_text(
        "import asyncio, os, sys\n"
        "from lightning_jax.rollouts.agents.process import run_program\n"
        "asyncio.run(run_program(['sh', '-c', sys.argv[1]], os.environ, b''))\n"
    )
    script = CHILDREN.format(pids=pids) + "wait"
    process = subprocess.Popen([sys.executable, "-c", trainer.read_text(), script])
    all_pids = await pids_in(pids, 3)
    process.kill()
    process.wait()
    await ended(all_pids)


@linux
async def test_a_program_that_kills_its_supervisor_ends_with_it(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    agent = shell(f"sleep 1000 & echo $! > {pids}; kill -9 $PPID; wait")
    rollout = await rolled_out(tmp_path, agent)
    assert (rollout.status, rollout.reason) == ("agent_failure", "KilledBySignal")
    await ended(await pids_in(pids, 1))


@linux
async def test_what_left_the_group_ends_with_a_killed_supervisor(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    until_there = f"while [ $(wc -l < {pids}) -lt 2 ]; do sleep 0.01; done"
    script = f"touch {pids}; " + f"{ESCAPE.format(pids=pids)}; " * 2 + until_there
    rollout = await rolled_out(tmp_path, shell(f"{script}; kill -9 $PPID; wait"))
    assert (rollout.status, rollout.reason) == ("agent_failure", "KilledBySignal")
    assert [is_running(pid) for pid in await pids_in(pids, 2)] == [False] * 2


@linux
async def test_what_left_the_group_ends_with_a_killed_guard(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    until_there = f"while [ $(wc -l < {pids}) -lt 1 ]; do sleep 0.01; done"
    kill = (
        "guard=$(($(cut -d' ' -f4 /proc/$PPID/stat)));"
        "grep -q supervisor.py /proc/$guard/cmdline && kill -9 $guard && sleep 60"
    )
    script = f"touch {pids}; {ESCAPE.format(pids=pids)}; {until_there}; {kill}"
    rollout = await rolled_out(tmp_path, shell(script))
    assert (rollout.status, rollout.reason) == ("agent_failure", "KilledBySignal")
    await ended(await pids_in(pids, 1))


@linux
async def test_a_program_that_stops_its_supervisor_ends_at_its_deadline(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    agent = shell(f"echo $$ > {pids}; kill -STOP $PPID; exec sleep 1000")
    rollout = await rolled_out(tmp_path, agent, timeout_s=1.0)
    assert rollout.reason == "deadline"
    await ended(await pids_in(pids, 1))


async def test_a_program_may_signal_its_supervisor() -> None:
    assert await shell("kill -TERM $PPID; kill -HUP $PPID; echo 1")(TASKS[0], URL) == 1


# ---- Limits --------------------------------------------------------------------------------------


@linux
async def test_a_program_with_too_many_processes_is_ended(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    agent = shell(
        f"for i in $(seq 12); do sleep 1000 & echo $! >> {pids}; done; wait", max_processes=9
    )
    rollout = await rolled_out(tmp_path, agent)
    assert (rollout.status, rollout.reason) == ("agent_failure", "OverLimit")
    assert "agent.max_processes=9" in (rollout.detail or "")
    assert not any(is_running(int(pid)) for pid in pids.read_text().split())


@linux
async def test_a_program_that_forks_without_end_is_ended(tmp_path: Path) -> None:
    """The forking stops by itself, so that a failed test does no harm."""
    bomb = (
        "import os, time\nfor _ in range(9):\n    os.fork()\n    time.sleep(0.05)\ntime.sleep(60)"
    )
    words = [sys.executable, "-I", "-S", "-c", bomb]
    rollout = await rolled_out(
        tmp_path, make_agent(AgentConfig(command=words, max_processes=20)), timeout_s=60.0
    )
    assert (rollout.reason, rollout.attempt) == ("OverLimit", 1)


@linux
@pytest.mark.parametrize(
    ("hog", "reason"),
    [
        ("b = bytearray(300 * 2**20)", "ExitStatus"),  # raises MemoryError itself
        (
            "import os, time\nfor _ in range(4): os.fork()\n"
            "b = bytearray(40 * 2**20); time.sleep(60)",
            "OverLimit",
        ),
    ],
)
async def test_a_program_that_takes_too_much_memory_is_ended(
    tmp_path: Path, hog: str, reason: str
) -> None:
    words = [sys.executable, "-I", "-S", "-c", hog]
    agent = make_agent(AgentConfig(command=words, memory_mib=200.0))
    rollout = await rolled_out(tmp_path, agent, timeout_s=60.0)
    assert (rollout.status, rollout.reason) == ("agent_failure", reason), rollout.detail


@linux
async def test_the_kernel_ends_programs_before_the_trainer(tmp_path: Path) -> None:
    assert await shell("sh -c 'cat /proc/self/oom_score_adj'")(TASKS[0], URL) == 1000
    assert int(Path("/proc/self/oom_score_adj").read_text()) < 1000


async def test_a_program_gets_no_secret_unless_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CLOUD_TOKEN", "secret")
    monkeypatch.setenv("https_proxy", "http://proxy:1")
    script = "echo $https_proxy; echo ${MODE:-none} >&2; test -z $CLOUD_TOKEN && echo 0 || echo 1"
    assert await shell(script)(TASKS[0], URL) == 0
    assert await shell(script, env=("CLOUD_TOKEN",))(TASKS[0], URL) == 1
    assert await shell("echo $A $B", env=("A=x=y", "B=", "NOT_SET"))(TASKS[0], URL) == "x=y"
    assert inherited([])["https_proxy"] == "http://proxy:1"


async def test_a_program_begins_with_the_limit_of_files_that_the_trainer_had() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (500, hard))
        assert raise_limit() > 500
        assert await shell("ulimit -n")(TASKS[0], URL) == original_limit() <= soft
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_hundreds_of_other_processes_do_not_hold_up_the_loop(tmp_path: Path) -> None:
    """At its end only its own processes are inspected: the trainer reads nothing in /proc."""
    opened: list[str] = []
    sys.addaudithook(lambda event, args: event == "open" and opened.append(str(args[0])))
    assert await shell("echo 1")(TASKS[0], URL) == 1
    assert not [path for path in opened if path.startswith("/proc")]


# ---- Leftover processes --------------------------------------------------------------------------


async def test_what_it_left_behind_ends_with_it(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    until_there = f"while [ $(wc -l < {pids}) -lt 3 ]; do sleep 0.01; done"
    agent = shell(f"touch {pids}\n{CHILDREN.format(pids=pids)}{until_there}; echo 1")
    assert await agent(TASKS[0], URL) == 1  # its children also hold its output open
    assert [is_running(pid) for pid in await pids_in(pids, 3)] == [False] * 3


async def test_what_ends_politely_is_not_killed(tmp_path: Path) -> None:
    pids, last_words = tmp_path / "pids", tmp_path / "said"
    agent = shell(f"trap 'echo bye > {last_words}; exit' TERM; echo $$ > {pids}; sleep 1000 & wait")
    rollout = asyncio.ensure_future(agent(TASKS[0], URL))
    (pid,) = await pids_in(pids, 1)
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout
    assert last_words.read_text() == "bye\n" and not is_running(pid)


async def test_a_cancelled_run_leaves_no_process(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    async with running(tmp_path, shell(CHILDREN.format(pids=pids) + "wait")) as runner:
        run = asyncio.ensure_future(run_requests(make_requests(TASKS[:2], "train", 0, 1), runner))
        all_pids = await pids_in(pids, 6)
        assert all(is_running(pid) for pid in all_pids)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    assert not any(is_running(pid) for pid in all_pids)


async def test_an_endless_loop_of_calls_ends_at_the_deadline(tmp_path: Path) -> None:
    program = tmp_path / "agent.py"
    program.write_text(
        "import json, os, urllib.request\n"
        "body = {'model': os.environ['OPENAI_MODEL'], 'max_tokens': 1,\n"
        "        'messages': [{'role': 'user', 'content': '?'}]}\n"
        "request = urllib.request.Request(\n"
        "    os.environ['OPENAI_BASE_URL'] + '/chat/completions', json.dumps(body).encode(),\n"
        "    {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY'],\n"
        "     'Content-Type': 'application/json'})\n"
        "while True:\n"
        "    urllib.request.urlopen(request).read()\n"
    )
    endless = make_agent(AgentConfig(command=[sys.executable, "-S", str(program)]))
    async with running(tmp_path, load_agent(f"{TOY}:run"), timeout_s=60.0) as runner:
        await run_requests(make_requests(TASKS[1:2], "train", 0, 1), runner)  # compiles
        impatient = replace(runner.config, timeout_s=1.0)
        runner = replace(runner, agent=endless, config=impatient)
        (rollout,) = await run_requests(make_requests(TASKS[:1], "train", 1, 1), runner)
        assert (rollout.status, rollout.reason) == ("agent_failure", "deadline")
        assert len(runner.store.spans(rollout.rollout_id)) > 2


# ---- A function in another interpreter ----------------------------------------------------------

OTHER_AGENTS = """
import os, subprocess, sys, threading, time, types
import opentelemetry

async def measured(task, llm):
    print("words of the agent's own", flush=True)
    threading.Thread(target=time.sleep, args=(60,)).start()
    assert "lightning_jax" not in types.__file__
    urls = llm.base_url == os.environ["OPENAI_BASE_URL"] and llm.model == "policy"
    return {"reward": float(task["question"] == "0?"), "urls": urls}

async def traced(task, llm):
    from opentelemetry import trace
    span = trace.get_current_span().get_span_context()
    return float(f"{span.trace_id:032x}-{span.span_id:016x}" in os.environ["TRACEPARENT"])

async def quiet(task, llm):
    pass

async def odd(task, llm):
    return {"reward": object()}

async def not_finite(task, llm):
    return float("nan")

async def broken(task, llm):
    raise KeyError("no such tool")

async def cut_off(task, llm):
    raise ConnectionRefusedError("the search gave no answer")

async def no_memory(task, llm):
    raise MemoryError()

async def no_thread(task, llm):
    raise RuntimeError("can't start new thread")

async def group_of_broken(task, llm):
    error = Exception("two")
    error.exceptions = (ConnectionError("down"), KeyError("no such tool"))
    raise error

async def cut_off_in_a_group(task, llm):
    error = Exception("one")
    error.exceptions = (ConnectionRefusedError("the search gave no answer"),)
    raise error

class Mute(Exception):
    def __str__(self):
        return self.args[0]

async def mute(task, llm):
    raise Mute()

async def numbers(task, llm):
    import numpy
    return {"reward": numpy.float32(1), "n": numpy.int64(3)}

class Broken:
    ndim = 0
    def item(self):
        raise RuntimeError("a tensor without data")
    def __repr__(self):
        raise RuntimeError("and without a name")

async def without_values(task, llm):
    loop = []
    loop.append(loop)
    return {"reward": 1.0, "f1": None, "em": float("nan"), "pair": (1, 2), "loop": loop,
            "broken": Broken(), "log": "x" * 2**21, ("a", "b"): 0.5, "n": 3}

async def named(task, llm):
    return float(__name__ == "agent" and sys.modules["agent"].named is named)

async def gone(task, llm):
    print("good bye", file=sys.stderr)
    os._exit(3)

async def slow(task, llm):
    subprocess.Popen(["sleep", "1000"])
    time.sleep(1000)

def plain(task, llm):
    import asyncio
    return asyncio.run(measured(task, llm))
"""


@pytest.fixture
def other_agents(tmp_path: Path) -> Path:
    path = tmp_path / "agent.py"
    path.write_text(OTHER_AGENTS)
    return path


def there(path: Path, function: str, python: str = sys.executable) -> Agent:
    return make_agent(AgentConfig(f"{path}:{function}", python=python))


NO_VALUES = (
    "null/f1",
    "not_finite/em",
    *(f"wrong_type/{n}" for n in ("pair", "loop", "broken", "log")),
)


@pytest.mark.parametrize(
    ("function", "metrics"),
    [
        ("measured", {"urls": 1.0}),
        ("plain", {"urls": 1.0}),
        ("numbers", {"n": 3.0}),  # numpy's
        ("named", {}),  # by which it can be imported
        ("traced", {}),  # below the rollout's span
        (
            "without_values",
            {"n": 3.0, "('a', 'b')": 0.5} | {f"dropped_metrics/{n}": 1.0 for n in NO_VALUES},
        ),
    ],
)
async def test_a_function_runs_in_another_interpreter(
    other_agents: Path, tmp_path: Path, function: str, metrics: dict[str, float]
) -> None:
    rollout = await rolled_out(tmp_path, there(other_agents, function))
    assert (rollout.status, rollout.reward) == ("scored", 1.0), rollout.detail
    assert rollout.metrics == metrics


@pytest.mark.parametrize(
    ("function", "status", "reason", "detail"),
    [
        ("quiet", "agent_failure", "no_reward", "None"),
        ("odd", "agent_failure", "bad_reward", "<object object"),
        ("not_finite", "agent_failure", "bad_reward", "nan"),
        ("broken", "agent_failure", "KeyError", "'no such tool'"),
        ("group_of_broken", "agent_failure", "KeyError", "'no such tool'"),
        ("mute", "agent_failure", "Mute", ""),
        ("gone", "agent_failure", "ExitStatus", "3: good bye"),
        ("slow", "agent_failure", "deadline", "1 s"),
        ("cut_off", "infrastructure_failure", "ConnectionRefusedError", ""),
        ("cut_off_in_a_group", "infrastructure_failure", "ConnectionRefusedError", ""),
        ("no_memory", "infrastructure_failure", "MemoryError", ""),
        ("no_thread", "infrastructure_failure", "RuntimeError", "can't start new thread"),
    ],
)
async def test_its_faults_are_those_of_any_coroutine(
    other_agents: Path, tmp_path: Path, function: str, status: str, reason: str, detail: str
) -> None:
    limit_s = 1.0 if function == "slow" else 60.0
    rollout = await rolled_out(tmp_path, there(other_agents, function), timeout_s=limit_s)
    assert (rollout.status, rollout.reason) == (status, reason)
    assert detail in (rollout.detail or "")


async def test_there_its_own_limit_of_memory_is_its_fault(
    other_agents: Path, tmp_path: Path
) -> None:
    config = AgentConfig(f"{other_agents}:no_memory", python=sys.executable, memory_mib=2000.0)
    rollout = await rolled_out(tmp_path, make_agent(config))
    assert (rollout.status, rollout.reason) == ("agent_failure", "MemoryError")


@pytest.mark.parametrize(
    ("function", "source", "words"),
    [
        ("run", "import no_such_framework", "No module named 'no_such_framework'"),
        ("run", "1 +", "invalid syntax"),
        ("run", "raise KeyError('HOME')", "KeyError: 'HOME'"),
        ("run", "run = 1", "no function 'run'"),
    ],
)
def test_what_cannot_be_loaded_there_is_told_at_the_start(
    tmp_path: Path, function: str, source: str, words: str
) -> None:
    path = tmp_path / "agent.py"
    path.write_text(source)
    with raises_coded(ConfigError, "not_loaded", "agent.python") as caught:
        there(path, function)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@linux
def test_loading_that_takes_too_long_ends_with_all_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "LOAD_TIMEOUT_S", 1.0)
    path, pids = tmp_path / "agent.py", tmp_path / "pids"
    path.write_text(
        "import subprocess, time\n"
        "child = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        f"open({str(pids)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    with raises_coded(ConfigError, "timeout", "agent.python"):
        there(path, "run")
    assert not is_running(int(pids.read_text()))


def test_an_interpreter_that_is_not_there_is_told_at_the_start(other_agents: Path) -> None:
    with raises_coded(ConfigError, "not_found", "agent.python"):
        there(other_agents, "measured", "/nowhere/python")
