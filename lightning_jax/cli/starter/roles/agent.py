"""Starter agent of two roles: a planner turns a story into a sum, a worker calculates it.

The header x-agent-name says who calls. config.yaml says who trains.
"""

import re
from typing import Any

import openai

PLANNER: list[Any] = [
    {"role": "system", "content": "Write the sum. Do not calculate it."},
    {"role": "user", "content": "Ida has 14 pens and finds 3 more. How many now?"},
    {"role": "assistant", "content": "14 + 3"},
    {"role": "user", "content": "Ida has 25 pens and gives 7 away. How many now?"},
    {"role": "assistant", "content": "25 - 7"},
]
WORKER: list[Any] = [
    {"role": "system", "content": "Calculate."},
    {"role": "user", "content": "25 - 7"},
    {"role": "assistant", "content": "18"},
]


async def run(task: dict[str, Any], llm: Any) -> float:
    """Return the reward: 0.2 for a sum and 0.8 for the right result."""
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:

        async def ask(role: str, messages: list[Any], text: str) -> str:
            completion = await client.chat.completions.create(
                model=llm.model,
                messages=[*messages, {"role": "user", "content": text}],
                max_tokens=12,
                extra_headers={"x-agent-name": role},
            )
            return (completion.choices[0].message.content or "").strip()

        plan = await ask("planner", PLANNER, task["text"])
        result = await ask("worker", WORKER, plan)
    return 0.2 * bool(re.fullmatch(r"\d+ [+-] \d+", plan)) + 0.8 * (result == str(task["answer"]))
