"""Starter agent that writes a date as YYYY-MM-DD. Make it yours.

lightning_jax only calls `run` and passes the policy's URL in `llm`. The rest is up to you: any
number of calls, any framework, tools, other people's code.
"""

import re
from typing import Any

import openai

EXAMPLE: list[Any] = [
    {"role": "system", "content": "Write the date as YYYY-MM-DD."},
    {"role": "user", "content": "July 4, 1976"},
    {"role": "assistant", "content": "1976-07-04"},
]


async def run(task: dict[str, Any], llm: Any) -> float:
    """Return the reward of one attempt. `task` is a line of tasks.jsonl."""
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        completion = await client.chat.completions.create(
            model=llm.model,
            messages=[*EXAMPLE, {"role": "user", "content": task["text"]}],
            max_tokens=24,
        )
    return reward(task, completion.choices[0].message.content or "")


def reward(task: dict[str, Any], reply: str) -> float:
    """Return 0 for a reply without such a date, else 0.1 plus 0.3 for each correct year, month and
    day.

    Partial rewards tell a weak policy in which direction to improve.
    """
    match = re.search(r"\d{4}-\d{2}-\d{2}", reply)
    if match is None:
        return 0.0
    pairs = zip(match[0].split("-"), task["date"].split("-"), strict=True)
    return 0.1 + 0.3 * sum(part == expected for part, expected in pairs)
