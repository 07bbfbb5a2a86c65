"""Starter agent that calculates with a tool. Make it yours."""

import re
from typing import Any

import openai

SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "calculate", "parameters": SCHEMA}}]
CALL = {"name": "calculate", "arguments": '{"expression": "31 * 24"}'}
EXAMPLE: list[Any] = [
    {"role": "user", "content": "31 boxes with 24 pens in each. How many pens?"},
    {"role": "assistant", "tool_calls": [{"type": "function", "id": "0", "function": CALL}]},
    {"role": "tool", "tool_call_id": "0", "content": "744"},
    {"role": "assistant", "content": "744"},
]


def calculate(arguments: str) -> str:
    """Return the result, or an error that the model reads."""
    if (match := re.search(r"(\d{1,9}) ([+*]) (\d{1,9})", arguments)) is None:
        return "error: expected two numbers, such as 31 * 24"
    a, b = int(match[1]), int(match[3])
    return str(a + b if match[2] == "+" else a * b)


async def run(task: dict[str, Any], llm: Any) -> float:
    """Return the reward: 0.2 for calling the tool, 0.3 for the right call, 0.5 for the answer."""
    messages, values, text = [*EXAMPLE, {"role": "user", "content": task["text"]}], [], None
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        chat = client.chat.completions
        while text is None and len(values) < 3:
            reply = await chat.create(model=llm.model, messages=messages, tools=TOOLS)
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in messages[-1].get("tool_calls", []):
                values.append(calculate(call["function"]["arguments"]))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": values[-1]})
            text = None if message.tool_calls else (message.content or "").strip()
    return 0.2 * bool(values) + 0.3 * (task["answer"] in values) + 0.5 * (text == task["answer"])
