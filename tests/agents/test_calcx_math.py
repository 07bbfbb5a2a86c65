"""Tests of the solver with a scripted server and the real calculator, and of demonstrations."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest
from scripted_server import calling, serving

pytest.importorskip("autogen_ext.tools.mcp", reason="the extra calcx is not installed")

import calculator_client
import calcx_math

TASK = {
    "id": "clips",
    "source": "gsm8k",
    "question": "Natalia sold 48 clips in April and half as many in May. How many in all?",
    "result": "72",
    "chain": 'In May she sold 48/2 = <gadget id="calculator">48/2</gadget>\n<output>24</output>\n'
    '24 clips.\n<gadget id="calculator">48 + 24</gadget>\n<output>72</output>\n72 in all.\n\n'
    "<result>72</result>",
}
RIGHT = {"reward": 1.0, "result_accuracy": 1.0}
WRONG = {"reward": 0.0, "result_accuracy": 0.0}
FIRST = [
    {
        "role": "system",
        "content": "Solve the problem. Compute with the calculator. End with: The answer is "
        "NUMBER.",
    },
    {"role": "user", "content": TASK["question"]},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes arithmetic.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"title": "Expression", "type": "string"}},
            "required": ["expression"],
            "additionalProperties": False,
        },
        "strict": False,
    },
}
PROGRAM = str(calcx_math.__file__)


def compute(expression: str) -> dict[str, Any]:
    return calling("calculator", json.dumps({"expression": expression}))


async def test_a_solution_in_two_calculations() -> None:
    async with serving([compute("48/2"), compute("48 + 24"), "The answer is 72."]) as server:
        assert await calcx_math.run(TASK, server) == RIGHT
    assert server.agents == ["solver"] * 3
    assert server.bodies[0]["messages"] == FIRST
    assert server.bodies[0]["tools"] == [TOOL]
    assert [body["messages"][-1]["content"] for body in server.bodies[1:]] == ["24", "72"]
    assert server.bodies[1]["messages"][:2] == FIRST
    assert server.bodies[0]["max_tokens"] == calcx_math.MAX_TOKENS
    assert "temperature" not in server.bodies[0]  # set by the run, not by the agent
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert server.other_paths == []


async def test_a_question_ends_with_the_prompt_ask() -> None:
    async with serving(["The answer is 72."]) as server:
        server.prompts["ask"] = "Be brief."
        assert await calcx_math.run(TASK, server) == RIGHT
    question = {"role": "user", "content": f"{TASK['question']}\nBe brief."}
    assert server.bodies[0]["messages"] == [FIRST[0], question]


async def test_with_rounds_it_has_to_calculate_and_then_to_answer() -> None:
    async with serving([compute("48/2"), compute("48 + 24"), "The answer is 72."]) as server:
        assert await calcx_math.run(TASK, server, rounds=2) == RIGHT
    first, second, last = server.bodies
    assert first["tool_choice"] == second["tool_choice"] == "required"
    assert first["parallel_tool_calls"] is second["parallel_tool_calls"] is False
    assert not last.keys() & {"tools", "tool_choice", "parallel_tool_calls"}
    assert last["messages"][-1]["content"] == "72"


@pytest.mark.parametrize("reply", ["", "The answer is 71."])
async def test_with_rounds_no_answer_is_a_wrong_one(reply: str) -> None:
    async with serving([compute("48 + 24"), reply]) as server:
        assert await calcx_math.run(TASK, server, rounds=1) == WRONG


async def test_rounds_below_one_are_refused() -> None:
    async with serving([]) as server:
        with pytest.raises(ValueError, match="rounds is 0"):
            await calcx_math.run(TASK, server, rounds=0)
    assert server.bodies == []


async def test_a_wrong_answer_and_none_at_all() -> None:
    for reply in ("The answer is 71.", "I do not know.", ""):
        async with serving([reply]) as server:
            assert await calcx_math.run(TASK, server) == WRONG


@pytest.mark.parametrize(
    "call, hint",
    [
        (compute("1/0"), "Error: division by zero"),
        (compute("__import__('os').getpid()"), "Error: only numbers with"),
        (calling("calculator", '{"x": "1"}'), "Error: expected one text, 'expression'"),
        (calling("calculator", "not JSON"), "Error: "),
        (calling("calculator", "[1]"), "Error: "),
        (calling("nothing", "{}"), "not found"),
    ],
)
async def test_the_model_sees_the_error_of_a_bad_call(call: dict[str, Any], hint: str) -> None:
    async with serving([call, "The answer is 72."]) as server:
        assert await calcx_math.run(TASK, server) == RIGHT
    content = server.bodies[1]["messages"][-1]["content"]
    assert hint in content
    assert len(content) < 250


async def test_words_beside_a_call_come_back_with_it() -> None:
    call = calling("calculator", '{"expression": "48/2"}', text="In May she sold")
    async with serving([call, "The answer is 72."]) as server:
        await calcx_math.run(TASK, server)
    message = server.bodies[1]["messages"][2]
    assert message["content"] == "In May she sold"
    assert message["tool_calls"][0]["function"]["arguments"] == '{"expression": "48/2"}'


async def test_an_agent_that_never_answers_ends() -> None:
    async with serving([compute("1 + 1")] * (calcx_math.MAX_CALLS + 1)) as server:
        assert await calcx_math.run(TASK | {"result": "2"}, server) == WRONG
    assert len(server.bodies) == calcx_math.MAX_CALLS


async def test_without_the_tool() -> None:
    async with serving(["48/2 = 24\n48 + 24 = 72\nThe answer is 72."]) as server:
        assert await calcx_math.run_without_tool(TASK, server) == RIGHT
    assert "tools" not in server.bodies[0]
    assert server.bodies[0]["messages"][0]["content"].startswith("Solve the problem. End with")


@pytest.mark.parametrize("fault", ["import os; os._exit(1)", "import time; time.sleep(60)"])
async def test_a_broken_calculator_ends_the_rollout(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(PROGRAM).parent)!r})\n"
        "import calculator_server as s\n"
        f"def calculate(expression):\n    {fault}\n"
        "s.calculate = calculate\ns.anyio.run(s.main)"
    )
    monkeypatch.setattr(calculator_client, "COMMAND", (sys.executable, "-c", code))
    monkeypatch.setattr(calculator_client, "CALL_LIMIT_S", 0.5)
    async with serving([compute("1 + 1"), "The answer is 72."]) as server:
        with pytest.raises(calculator_client.CalculatorBroken):
            await calcx_math.run(TASK, server)
    assert len(server.bodies) == 1  # no call follows
    await calcx_math.shared_calculator().close()


async def test_a_failing_server_fails_the_rollout() -> None:
    async with serving([compute("1 + 1"), 500]) as server:
        with pytest.raises(openai.InternalServerError, match="scripted failure"):
            await calcx_math.run(TASK, server)


# ---- Demonstrations ------------------------------------------------------------------------------


def test_a_demonstration_is_what_the_agent_would_send() -> None:
    (found,) = calcx_math.demonstrate([TASK])
    assert found["tools"] == [TOOL]
    assert json.dumps(found["tools"]) == json.dumps([TOOL])  # the model sees the order of keys
    system, user, first, output, second, total, answer = found["messages"]
    assert [system, user] == FIRST
    assert first["content"] == "In May she sold 48/2 ="
    assert first["tool_calls"][0]["function"] == {
        "name": "calculator",
        "arguments": '{"expression": "48/2"}',
    }
    assert output == {"role": "tool", "tool_call_id": "call_0", "content": "24"}
    assert second["content"] == "24 clips."
    assert total["content"] == "72"
    assert answer == {"role": "assistant", "content": "72 in all.\nThe answer is 72."}


def test_a_demonstration_without_the_tool() -> None:
    ((_, user, answer),) = calcx_math.demonstrate_without_tool([TASK])
    assert user["content"] == TASK["question"]
    assert answer["content"].splitlines() == [
        "In May she sold 48/2 =",
        "48/2 = 24",
        "24 clips.",
        "48 + 24 = 72",
        "72 in all.",
        "The answer is 72.",
    ]


def test_a_demonstration_in_one_call() -> None:
    (found,) = calcx_math.demonstrate_in_one_call([TASK])
    system, user, call, output, answer = found["messages"]
    assert [system, user] == FIRST
    assert call["content"] == ""
    arguments = '{"expression": "48 + (48/2)"}'
    assert call["tool_calls"][0]["function"] == {"name": "calculator", "arguments": arguments}
    assert output["content"] == "72"
    assert answer == {"role": "assistant", "content": "The answer is 72."}


@pytest.mark.parametrize(
    ("expressions", "whole"),
    [
        (["3 + 2"], "3 + 2"),
        (["7 - 2", "1.5 * 5", "7.5 / 5 - 0.5"], "(1.5 * (7 - 2)) / (7 - 2) - 0.5"),
        (["7 - 2", "1.5 * 5", "7.5 - 1"], "(1.5 * (7 - 2)) - 1"),
        (["7 - 2", "7 + 2", "9 / 5"], "(7 + 2) / (7 - 2)"),
        (["7 - 2", "5 * 5"], "(7 - 2) * (7 - 2)"),
        (["7 - 2", "55 - 15"], ""),  # nothing uses the 5
        (["7 - 4", "3 * 2"], ""),  # 3 is also in the question
        (["1 / 0"], ""),
        ([], ""),
    ],
)
def test_calculations_in_one_expression(expressions: list[str], whole: str) -> None:
    chain = "".join(f'<gadget id="calculator">{expression}</gadget>' for expression in expressions)
    task = TASK | {"question": "3 birds and 7 storks met 2 ducks.", "chain": chain}
    assert calcx_math.in_one_expression(task) == whole


@pytest.mark.parametrize(
    "chain",
    [None, "", "no calculation", '<gadget id="calculator">x + 1</gadget><output>2</output>'],
)
def test_a_task_without_a_solution_shows_nothing(chain: str | None) -> None:
    task = TASK | {"chain": chain}
    assert calcx_math.demonstrate([task]) == calcx_math.demonstrate_without_tool([task]) == []
    assert calcx_math.demonstrate_in_one_call([task]) == []


# ---- Command line --------------------------------------------------------------------------------


async def test_by_hand() -> None:
    import asyncio

    async with serving([compute("48/2"), "The answer is 24."]) as server:
        process = await asyncio.create_subprocess_exec(
            sys.executable, PROGRAM, "--base-url", server.base_url, "--question", "48/2?",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    assert "24" in out.decode() and "The answer is 24." in out.decode()


def test_a_missing_framework_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "autogen_agentchat.py").write_text("raise ModuleNotFoundError('no autogen')")
    done = subprocess.run(
        [sys.executable, PROGRAM, "--help"],
        capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "pip install -e '.[calcx]'" in done.stderr
