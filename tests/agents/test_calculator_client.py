"""Tests of the shared calculator, with real and broken servers: only the breaking call fails."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from broken_servers import NO_SERVERS, processes_of_session

pytest.importorskip("mcp.server.lowlevel", reason="the extra calcx is not installed")

import calculator_client
from calculator_client import COMMAND, Calculator, CalculatorBroken

AGENTS = Path(str(calculator_client.__file__)).parent

# A server that fails as the expression requests, built from the real one.
WILD = f"""
import os, sys, time
sys.path.insert(0, {str(AGENTS)!r})
import calculator_server
def calculate(expression):
    if expression == "crash": os._exit(1)
    if expression == "hang": time.sleep(1000)
    if expression == "shout": return "9" * 10_000_000
    if expression == "child":
        if os.fork() == 0: time.sleep(1000)
        os._exit(1)
    time.sleep(0.1)
    return "fine"
calculator_server.calculate = calculate
calculator_server.anyio.run(calculator_server.main)
"""


@pytest_asyncio.fixture
async def ours() -> AsyncIterator[Calculator]:
    calculator = Calculator(COMMAND)
    yield calculator
    await calculator.close()


async def value(calculator: Calculator, expression: str) -> str:
    result = await calculator.call_tool("calculator", {"expression": expression})
    return "".join(part.text for part in result.content if part.type == "text")


async def test_many_callers_share_one_server(ours: Calculator) -> None:
    before = calculator_client.USAGE.starts
    values = await asyncio.gather(*(value(ours, f"{n} * 2") for n in range(40)))
    assert values == [str(2 * n) for n in range(40)]
    assert calculator_client.USAGE.starts == before + 1
    assert (await ours.tool()).name == "calculator"


async def test_a_fault_of_the_expression_is_an_answer(ours: Calculator) -> None:
    result = await ours.call_tool("calculator", {"expression": "1/0"})
    assert result.isError
    assert await value(ours, "1/0") == "Error: division by zero"
    assert (await ours.call_tool("calculator", {"wrong": "1"})).isError
    assert (await ours.call_tool("nothing", {"expression": "1"})).isError
    assert await value(ours, "1 + 1") == "2"


async def test_half_a_character_is_an_answer(ours: Calculator) -> None:
    await ours.tool()
    server = ours.server
    assert (await value(ours, "1 + \ud800")).startswith("Error: '1 + ?'")
    assert (await ours.call_tool("calculator", {"\udfff": "1"})).isError
    assert (await ours.call_tool("\ud800", {"expression": "1"})).isError
    assert await value(ours, "1 + 1") == "2"
    assert ours.server is server


@pytest.mark.parametrize("fault", ["crash", "hang", "shout", "child"])
async def test_a_broken_call_fails_alone(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault in ("hang", "child"):  # on a busy machine a normal call may take a second, too
        monkeypatch.setattr(calculator_client, "CALL_LIMIT_S", 1.0)
    calculator = Calculator([sys.executable, "-c", WILD])
    await calculator.tool()
    server = calculator.server
    assert server is not None
    group = server.pid
    calls = [value(calculator, word) for word in ("2", fault, "3", "4")]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(results[1], CalculatorBroken)
    assert [results[0], *results[2:]] == ["fine"] * 3
    assert await value(calculator, "5") == "fine"
    await calculator.close()
    assert processes_of_session(group) == []


@pytest.mark.parametrize("code", NO_SERVERS.values(), ids=NO_SERVERS.keys())
async def test_a_program_that_is_no_server_is_an_error(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calculator_client, "START_LIMIT_S", 1.0)
    calculator = Calculator([sys.executable, "-c", code])
    started = time.monotonic()
    with pytest.raises(CalculatorBroken):
        await calculator.call_tool("calculator", {"expression": "1"})
    assert time.monotonic() - started < 5
    await calculator.close()


async def test_a_missing_program_is_an_error() -> None:
    with pytest.raises(CalculatorBroken, match="FileNotFoundError"):
        await Calculator(["/nowhere/python"]).tool()


async def test_a_caller_that_is_cancelled_leaves_the_others(ours: Calculator) -> None:
    first = asyncio.create_task(value(ours, "1 + 1"))
    second = asyncio.create_task(value(ours, "2 + 2"))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == "4"


def test_no_process_outlives_its_user() -> None:
    """Users return, are killed or exit.

    They are forks of one program, because importing is slow.
    """
    ends = {"pass": 0, "os.kill(os.getpid(), 9)": -9, "raise SystemExit(3)": 3}
    program = f"""
import asyncio, os, sys
sys.path.insert(0, {str(AGENTS)!r})
from calculator_client import shared_calculator
async def main(end):
    calculator = shared_calculator()
    await calculator.tool()
    os.write(1, b"%d\\n" % calculator.server.pid)  # in one piece: the others write there, too
    exec(end)
users = []
for end in {list(ends)}:
    users.append(os.fork())
    if users[-1] == 0:
        asyncio.run(main(end))
        sys.exit(0)
print(*(os.waitstatus_to_exitcode(os.waitpid(user, 0)[1]) for user in users))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    *servers, codes = done.stdout.splitlines()
    groups = [int(pid) for pid in servers]
    assert [int(code) for code in codes.split()] == list(ends.values())
    assert len(set(groups)) == len(ends)
    deadline = time.monotonic() + 5
    while any(map(processes_of_session, groups)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [processes_of_session(group) for group in groups] == [[]] * len(ends)
