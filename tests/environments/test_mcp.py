"""Tests of the client of MCP servers, with a server in plain Python and programs that are none."""

import asyncio
import shlex
import sys
import time
from pathlib import Path

import broken_servers
import pytest
from broken_servers import processes_of_session

from lightning_jax.environments.mcp import ServerBroken, ServerLimits, open_server

PROGRAM = Path(__file__).parents[1] / "mcp_program.py"
COMMAND = shlex.join([sys.executable, str(PROGRAM)])
CAPITAL = "capital_of"  # a function's name has no dot
NO_SERVERS = {
    **broken_servers.NO_SERVERS,
    "repeats": "import sys\nfor line in sys.stdin: print(line, flush=True)",
    "has odd tools": "import json\nfor n in (1, 2):\n"
    " print(json.dumps({'jsonrpc': '2.0', 'id': n, 'result': {'tools': [1]}}), flush=True)\n"
    "input(); input(); input(); import time; time.sleep(1000)",
    "lists tools for ever": "import json, sys\nfor line in sys.stdin:\n"
    " n = json.loads(line).get('id')\n"
    " tool = {'name': str(n), 'inputSchema': {}}\n"
    " result = {'tools': [tool] * 2, 'nextCursor': 'more'}\n"
    " print(json.dumps({'jsonrpc': '2.0', 'id': n, 'result': result}), flush=True)",
}


async def test_tools_of_all_pages_are_functions() -> None:
    async with open_server(COMMAND) as server:
        functions = [function["function"] for function in server.functions]
    assert [function["name"] for function in functions] == [CAPITAL, "note"]
    assert functions[0]["parameters"]["required"] == ["country"]
    assert functions[1]["description"] == ""


async def test_results_and_errors_are_texts_for_the_model() -> None:
    async with open_server(COMMAND, ServerLimits(result_chars=12)) as server:
        result = await server.call(CAPITAL, '{"country": "Japan"}')
        assert (result.text, result.is_error) == ("Tokyo", False)
        assert (await server.call(CAPITAL, {"country": "Narnia"})).is_error
        assert (await server.call("nothing", "{}")).text == "no such tool"
        for arguments in ("{", "[]", "", "[" * 100_000):
            assert (await server.call(CAPITAL, arguments)).is_error
        assert (await server.call("note", {})).text == "[image]\nkept"
        many = await asyncio.gather(*(server.call(CAPITAL, {"country": "Peru"}) for _ in range(20)))
    assert {result.text for result in many} == {"Lima"}


@pytest.mark.parametrize("fault", ["crash", "hang"])
async def test_a_broken_server_fails_its_calls_and_leaves_no_process(fault: str) -> None:
    async with open_server(COMMAND, ServerLimits(call_s=1.0)) as server:
        with pytest.raises(ServerBroken) as raised:
            await server.call(CAPITAL, {"country": fault})
        if fault == "crash":  # its last words are named, and no control character of them
            assert "ink" in str(raised.value) and "\x1b" not in str(raised.value)
            with pytest.raises(ServerBroken):
                await server.call(CAPITAL, {"country": "Peru"})
        group = server.pid
    assert processes_of_session(group) == []


@pytest.mark.parametrize("code", NO_SERVERS.values(), ids=NO_SERVERS.keys())
async def test_a_program_that_is_no_server_is_an_error(code: str) -> None:
    started = time.monotonic()
    with pytest.raises(ServerBroken):
        async with open_server([sys.executable, "-c", code], ServerLimits(start_s=1.0)):
            pass
    assert time.monotonic() - started < 6


@pytest.mark.parametrize("command", ["/nowhere/server", "", "a 'b"])
async def test_a_command_that_cannot_start_is_an_error(command: str) -> None:
    with pytest.raises(ServerBroken):
        async with open_server(command):
            pass


async def test_a_late_answer_reaches_no_other_call() -> None:
    code = f"import sys; sys.path.insert(0, {str(PROGRAM.parent)!r}); import mcp_program as m\n"
    code += "def call(name, arguments):\n"
    code += " m.time.sleep(arguments['s'])\n"
    code += " return {'content': [{'type': 'text', 'text': str(arguments)}]}\n"
    code += "m.call = call; m.main()"
    async with open_server([sys.executable, "-c", code], ServerLimits(call_s=1.0)) as server:
        with pytest.raises(ServerBroken):
            await server.call(CAPITAL, {"s": 1.3})
        assert (await server.call(CAPITAL, {"s": 0})).text == "{'s': 0}"
