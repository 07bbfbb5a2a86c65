"""Starter agent that answers requests with the tools of an MCP server. Make it yours."""

import json
from pathlib import Path
from typing import Any

import openai

from lightning_jax.environments.mcp import ServerBroken, open_server

SYSTEM: Any = {"role": "system", "content": "Answer the request in one sentence. Use the tools."}
EXAMPLE = json.loads(Path(__file__).with_name("example.json").read_text())  # a solved request


async def run(task: dict[str, Any], llm: Any, *, server: str, max_calls: int = 3) -> dict[str, Any]:
    """Return the reward for the calls: 0.2 if one works, 0.2 for the tool of the task, and 0.6 for
    its arguments. The judge in config.yaml compares the answers.
    """
    messages: list[Any] = [SYSTEM, *EXAMPLE, {"role": "user", "content": task["request"]}]
    rewards, is_done = [0.0], False
    async with (
        open_server(server) as tools,
        openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client,
    ):
        while not is_done:
            reply = await client.chat.completions.create(
                model=llm.model, messages=messages, tools=tools.functions
            )
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in messages[-1].get("tool_calls", []):
                text = await use(tools, call["function"], task, rewards)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
            is_done = not message.tool_calls or len(rewards) > max_calls
    return {"reward": max(rewards), "calls": len(rewards) - 1}


async def use(tools: Any, call: dict[str, str], task: dict[str, Any], rewards: list[float]) -> str:
    """Call a tool, add what the call earns, and return what the model reads."""
    try:
        result = await tools.call(call["name"], call["arguments"])
    except ServerBroken as error:
        rewards.append(0.0)
        return f"Error: {error}"
    if result.is_error:
        rewards.append(0.0)
        return result.text
    is_same = call["name"] == task.get("tool")
    has_arguments = is_same and json.loads(call["arguments"]) == task.get("arguments")
    rewards.append(0.2 + 0.2 * is_same + 0.6 * has_arguments)
    return result.text
