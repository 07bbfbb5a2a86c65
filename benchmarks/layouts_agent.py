"""Agent of benchmarks/layouts.py: the sums agent with tools that take long now and then.

It waits for a tool before the first call and after each reply, as an agent that looks something up
and checks its answer. The waits are a function of the rollout's id, so every layout has the same.
"""

import asyncio
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai

sys.path.insert(0, str(Path(__file__).parents[1] / "agents"))
from sum_answers import HINT, answer_of, first_messages, reward

MAX_REPLIES = 2


def waits(rollout: str, median_s: float, p90_s: float, most_s: float) -> Iterator[float]:
    """Yield log-normal durations with this median and 90th percentile, none above `most_s`."""
    rng = random.Random(rollout)
    sigma = math.log(p90_s / median_s) / 1.2816
    while True:
        yield min(median_s * rng.lognormvariate(0.0, sigma), most_s)


async def run(
    task: dict[str, Any], llm: Any, *, median_s: float, p90_s: float, most_s: float
) -> dict[str, float]:
    """Return the last reply's reward, divided by the number of replies."""
    rollout_id = llm.base_url.split("/rollout/")[1].split("/")[0]
    tools = waits(rollout_id, median_s, p90_s, most_s)
    messages: list[Any] = first_messages(task["question"])
    replies, waited_s = list[str](), 0.0
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        waited_s += (wait_s := next(tools))
        await asyncio.sleep(wait_s)
        while len(replies) < MAX_REPLIES:
            completion = await client.chat.completions.create(
                model=llm.model, messages=messages, max_tokens=32
            )
            replies.append(completion.choices[0].message.content or "")
            waited_s += (wait_s := next(tools))
            await asyncio.sleep(wait_s)
            if answer_of(replies[-1]) is not None:
                break
            messages.append({"role": "assistant", "content": replies[-1]})
            messages.append({"role": "user", "content": HINT})
    earned = reward(task, replies[-1]) / len(replies)
    return {"reward": earned, "replies": len(replies), "tool_s": waited_s}
