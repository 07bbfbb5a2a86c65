"""An agent to begin with: it writes a date the way that computers sort them. Make it yours.

`run` is all that lightning_jax calls, and the URL in `llm` is all that it gives. What happens in
between is up to you: as many calls as you like, any framework, tools, other people's code.
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
    """The reward of one attempt. `task` is a line of tasks.jsonl."""
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        completion = await client.chat.completions.create(
            model=llm.model,
            messages=[*EXAMPLE, {"role": "user", "content": task["text"]}],
            max_tokens=24,
        )
    return reward(task, completion.choices[0].message.content or "")


def reward(task: dict[str, Any], reply: str) -> float:
    """0 for a reply without such a date, else 0.1 and 0.3 for each of year, month and day that is
    right. Rewards between nothing and all tell a weak policy which way is up.
    """
    found = re.search(r"\d{4}-\d{2}-\d{2}", reply)
    if found is None:
        return 0.0
    pairs = zip(found[0].split("-"), task["date"].split("-"), strict=True)
    return 0.1 + 0.3 * sum(said == right for said, right in pairs)
