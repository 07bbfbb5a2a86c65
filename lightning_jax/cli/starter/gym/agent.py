"""Starter agent for a task family of reasoning-gym. Make it yours."""

import asyncio
from typing import Any

import openai

from lightning_jax.environments.gym import score

INSTRUCTION: Any = {"role": "system", "content": "Reply with the answer only, without a sentence."}


async def run(task: dict[str, Any], llm: Any) -> dict[str, float]:
    """Return the score of the family's own verifier, and whether it is the full one."""
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        completion = await client.chat.completions.create(
            model=llm.model,
            messages=[INSTRUCTION, {"role": "user", "content": task["question"]}],
        )
    reply = completion.choices[0].message.content or ""
    reward = await asyncio.to_thread(score, task, reply)  # some verifiers take seconds
    return {"reward": reward, "solved": float(reward >= 1.0)}
