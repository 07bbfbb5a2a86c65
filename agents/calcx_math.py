"""Word-problem solver: AutoGen's AssistantAgent with a calculator from an MCP server.

This is an ordinary AutoGen program for any OpenAI-compatible server, and has no code for training.
All problems being solved share one calculator process. The task is that of the calculator agent in
arXiv 2508.03680, on data from Calc-X (Kadlcik et al., EMNLP 2023).

    python agents/calcx_math.py --base-url http://127.0.0.1:8000/v1 --question "..."

A task is a dict with `id`, `question` and `result` (the right number as text). It may also have
`chain`, a solution in Calc-X's markup, for demonstrations.
"""

import argparse
import asyncio
import functools
import json
import re
import ssl
import sys
import warnings
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

try:
    import openai
    from autogen_agentchat.agents import AssistantAgent
    from autogen_agentchat.base import TaskResult
    from autogen_agentchat.messages import TextMessage, ToolCallExecutionEvent
    from autogen_core import CancellationToken
    from autogen_core.models import ModelInfo
    from autogen_ext.models.openai import OpenAIChatCompletionClient
    from autogen_ext.tools.mcp import StdioMcpToolAdapter, StdioServerParams
    from mcp import ClientSession, Tool
    from pydantic import ValidationError
except ImportError as error:
    message = (
        f"agents/calcx_math.py needs AutoGen and mcp below 2 ({error}); install them with the "
        "extra calcx: pip install -e '.[calcx]'"
    )
    if __name__ == "__main__":
        sys.exit(message)
    raise ImportError(message, name=error.name) from error

sys.path.insert(0, str(Path(__file__).parent))  # missing when this file is loaded by path
import calculator_client
from arithmetic import ArithmeticFault, calculate
from calculator_client import Calculator, CalculatorBroken, shared_calculator
from calculator_server import TOOL
from number_answers import score

MAX_CALLS = 8  # model calls: up to 7 calculations and one answer
MAX_TOKENS = 128  # per reply; enough for a 135M model, not for one that reasons in words
MAX_RESULT_CHARS = 200  # per calculator result

SYSTEM = "Solve the problem. Compute with the calculator. End with: The answer is NUMBER."
SYSTEM_WITHOUT_TOOL = "Solve the problem. End with: The answer is NUMBER."

warnings.filterwarnings("ignore", "Finish reason mismatch")  # AutoGen's, when a call was cut

Task = dict[str, Any]
Message = dict[str, Any]

INFO = ModelInfo(
    vision=False,
    function_calling=True,
    json_output=False,
    family="unknown",
    structured_output=False,
    multiple_system_messages=False,
)


class CalculatorTool(StdioMcpToolAdapter):
    """AutoGen adapter of an MCP tool that uses the shared session.

    It shortens results and messages, and records a broken calculator.
    """

    component_provider_override = None  # never serialized

    def __init__(self, tool: Tool, calculator: Calculator | None = None) -> None:
        parameters = StdioServerParams(command=calculator_client.COMMAND[0])
        super().__init__(parameters, tool, session=cast(ClientSession, calculator))
        self.broken: CalculatorBroken | None = None

    async def run_json(
        self, args: Any, cancellation_token: CancellationToken, call_id: str | None = None
    ) -> Any:
        try:
            return await super().run_json(args, cancellation_token, call_id)
        except ValidationError:
            raise ValueError(f"Error: expected one text, {self._argument!r}") from None
        except CalculatorBroken as error:
            self.broken = error
            raise

    def return_value_as_string(self, value: Any) -> str:
        text = "".join(part.text for part in value if part.type == "text")
        return text if len(text) <= MAX_RESULT_CHARS else text[:MAX_RESULT_CHARS] + "..."

    @property
    def _argument(self) -> str:
        return next(iter(self.schema.get("parameters", {}).get("properties", {})), "")


class CalculatingClient(OpenAIChatCompletionClient):
    """AutoGen's client, which requires one call wherever tools are offered."""

    component_provider_override = None  # never serialized

    async def create(self, messages: Any, **options: Any) -> Any:
        if options.get("tools"):
            options["tool_choice"] = "required"
            options["extra_create_args"] = {"parallel_tool_calls": False}
        return await super().create(messages, **options)


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()  # takes 20 ms, so all clients share one


async def solve(
    task: Task,
    llm: Any,
    *,
    use_tool: bool = True,
    max_tokens: int = MAX_TOKENS,
    rounds: int | None = None,
) -> TaskResult:
    """Return the finished conversation. `llm` has base_url, api_key and model.

    If `llm` has a prompt `ask`, that stands after the question. `rounds` is the number of
    calculations that the model must make before it answers; by default it decides.

    Raises ValueError for `rounds` below 1, and CalculatorBroken if the calculator failed a call,
    because no answer could be trusted then.
    """
    if rounds is not None and rounds < 1:
        raise ValueError(f"rounds is {rounds}; expected 1 or more.")
    tools: list[Any] = []
    if use_tool:
        calculator = shared_calculator()
        tools = [CalculatorTool(await calculator.tool(), calculator)]
    async with openai.DefaultAsyncHttpxClient(verify=_tls()) as http:
        connection: dict[str, Any] = {"http_client": http}  # accepted, but missing in its types
        client_type = OpenAIChatCompletionClient if rounds is None else CalculatingClient
        client = client_type(
            model=llm.model,
            base_url=llm.base_url,
            api_key=llm.api_key,
            model_info=INFO,
            max_tokens=max_tokens,
            include_name_in_message=False,
            default_headers={"x-agent-name": "solver"},
            **connection,
        )
        agent = AssistantAgent(
            "solver",
            client,
            tools=tools,
            system_message=SYSTEM if use_tool else SYSTEM_WITHOUT_TOOL,
            max_tool_iterations=MAX_CALLS if rounds is None else rounds,
            reflect_on_tool_use=rounds is not None,  # the answer, by a request without tools
        )
        ask = getattr(llm, "prompts", {}).get("ask", "")
        question = f"{task['question']}\n{ask}" if ask else task["question"]
        async with aclosing(agent.run_stream(task=question)) as events:
            async for event in events:
                if isinstance(event, TaskResult):
                    return event
                if isinstance(event, ToolCallExecutionEvent) and tools and tools[0].broken:
                    raise tools[0].broken
    raise AssertionError("AutoGen's last event is the result")


def final_reply(result: TaskResult) -> str:
    """Return the agent's last reply, or "" if it ran out of calls while still calculating."""
    last = result.messages[-1]
    return last.content if isinstance(last, TextMessage) else ""


async def run(
    task: Task,
    llm: Any,
    *,
    max_tokens: int = MAX_TOKENS,
    rounds: int | None = None,
) -> dict[str, float]:
    """Return the reward of one rollout, and whether Calc-X's own evaluation accepts its answer.

    See `solve`.
    """
    result = await solve(task, llm, max_tokens=max_tokens, rounds=rounds)
    return score(task["result"], final_reply(result))


async def run_without_tool(
    task: Task, llm: Any, *, max_tokens: int = MAX_TOKENS
) -> dict[str, float]:
    """Return the same for a rollout without a calculator."""
    result = await solve(task, llm, use_tool=False, max_tokens=max_tokens)
    return score(task["result"], final_reply(result))


# ---- Scores of stored attempts, for `lightning-jax rescore` ------------------------------------


def reward_of_attempt(task: Task, attempt: Any) -> float:
    """Return the reward of a stored rollout."""
    return score(task["result"], _stored_reply(attempt))["reward"]


def result_accuracy_of_attempt(task: Task, attempt: Any) -> float:
    """Return 1.0 if Calc-X's own evaluation accepts the answer of a stored rollout, else 0.0."""
    return score(task["result"], _stored_reply(attempt))["result_accuracy"]


def _stored_reply(attempt: Any) -> str:
    """Return the last reply, or "" if the last of MAX_CALLS is still a calculation."""
    num_calls = sum(message["role"] == "assistant" for message in attempt.transcript)
    is_unfinished = num_calls >= MAX_CALLS and "<tool_call>" in attempt.response
    return "" if is_unfinished else attempt.response


# ---- Demonstrations ----------------------------------------------------------------------------

_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_SEPARATOR = re.compile(r"(?<=\d)_(?=\d{3}(?!\d))")  # Calc-X's thousands separator
_GADGET = re.compile(r'<gadget id="calculator">(.*?)</gadget>\s*(?:<output>(.*?)</output>)?', re.S)


def steps_of(chain: str) -> tuple[list[tuple[str, str]], str]:
    """Return (words before it, expression) for each calculation, and the words after the last."""
    text = re.sub(r"<result>.*?</result>", "", chain, flags=re.S)
    text = _SEPARATOR.sub("", text)
    parts = _GADGET.split(text)  # words, expression, output, words, ..., words
    words = [part.strip() for part in parts[::3]]
    return list(zip(words, parts[1::3], strict=False)), words[-1]


@functools.cache
def tool_schema() -> dict[str, Any]:
    """Return the tool as AutoGen offers it to the model."""
    return {"type": "function", "function": {**CalculatorTool(TOOL).schema}}


def hint(task: Task) -> str:
    """Return the calculation and its result for a teacher to read.

    docs/howto/learn_from_hints.md says what a teacher does with it.
    """
    expression = in_one_expression(task)
    if not expression:
        return f"The answer is {task['result']}."
    return f"The right expression is {expression}, and the answer is {task['result']}."


def demonstrate(tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """Return demonstrations in OpenAI's fine-tuning form, for tasks whose chain can be calculated.

    The assistant messages are the ones to learn.
    """
    conversations = filter(None, map(_conversation, tasks))
    return [{"messages": messages, "tools": [tool_schema()]} for messages in conversations]


def _conversation(task: Task) -> list[Message]:
    """Return the task solved with the calculator, or nothing if its chain does not show how."""
    steps, after = steps_of(task.get("chain") or "")
    if not 1 <= len(steps) < MAX_CALLS:
        return []
    messages = _first_messages(task, SYSTEM)
    for index, (words, expression) in enumerate(steps):
        try:
            output = calculate(expression)
        except ArithmeticFault:
            return []
        arguments = json.dumps({"expression": expression})
        call = {"name": "calculator", "arguments": arguments}
        calls = [{"id": f"call_{index}", "type": "function", "function": call}]
        messages += [
            {"role": "assistant", "content": words, "tool_calls": calls},
            {"role": "tool", "tool_call_id": f"call_{index}", "content": output},
        ]
    return [*messages, {"role": "assistant", "content": _ending(after, task)}]


def demonstrate_in_one_call(tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """Return demonstrations with one calculation each, such as `(692 + 692) - 458`.

    The model then does not have to learn when to stop.
    """
    nested = [
        task | {"chain": f'<gadget id="calculator">{expression}</gadget>'}
        for task in tasks
        if (expression := in_one_expression(task))
    ]
    return demonstrate(nested)


def in_one_expression(task: Task) -> str:
    """Return the calculations of the task's chain, nested into one expression.

    Return "" if this is ambiguous: no later calculation uses a result, or it is also a number in
    the question.
    """
    numbers = set(_NUMBER.findall(task["question"]))
    whole, expressions, used = "", dict[str, str](), set[str]()  # expressions by result
    for _, expression in steps_of(task.get("chain") or "")[0]:
        if numbers & expressions.keys():
            return ""
        used |= expressions.keys() & set(_NUMBER.findall(expression))
        whole = _NUMBER.sub(
            lambda number, of=expressions: f"({of[number[0]]})" if number[0] in of else number[0],
            expression,
        )
        try:
            expressions = expressions | {calculate(expression): whole}
        except ArithmeticFault:
            return ""
    return whole if len(used) == len(expressions) - 1 else ""


def demonstrate_without_tool(tasks: Sequence[Task]) -> list[list[Message]]:
    """Return the same solutions with each calculation written out."""
    return [messages for task in tasks if (messages := _written_out(task))]


def _written_out(task: Task) -> list[Message]:
    steps, after = steps_of(task.get("chain") or "")
    lines = []
    for words, expression in steps:
        try:
            lines.append(f"{words}\n{expression} = {calculate(expression)}".strip())
        except ArithmeticFault:
            return []
    if not lines:
        return []
    reply = "\n".join([*lines, _ending(after, task)])
    return [*_first_messages(task, SYSTEM_WITHOUT_TOOL), {"role": "assistant", "content": reply}]


def _first_messages(task: Task, system: str) -> list[Message]:
    return [{"role": "system", "content": system}, {"role": "user", "content": task["question"]}]


def _ending(words: str, task: Task) -> str:
    return f"{words}\nThe answer is {task['result']}.".strip()


# ---- Command line ------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description="Solve a word problem with a calculator.")
    parser.add_argument(
        "--base-url", required=True, help="base URL of an OpenAI-compatible server, with /v1"
    )
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model", default="policy")
    parser.add_argument("--question", required=True)
    parser.add_argument("--no-tool", action="store_true", help="without the calculator")
    args = parser.parse_args()
    llm = SimpleNamespace(base_url=args.base_url, api_key=args.api_key, model=args.model)
    task = {"question": args.question}
    try:
        result = asyncio.run(solve(task, llm, use_tool=not args.no_tool))
    except openai.OpenAIError as error:
        parser.exit(1, f"{args.base_url} gave no answer: {error}\n")
    except CalculatorBroken as error:
        parser.exit(1, f"the calculator broke: {error}\n")
    for message in result.messages:
        print(f"[{type(message).__name__}] {message.to_text()}")


if __name__ == "__main__":
    main()
