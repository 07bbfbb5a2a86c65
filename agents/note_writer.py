"""Agent that writes a note in one call and returns no reward: components of `rewards` score it."""

from typing import Any

import openai


async def run(task: dict[str, Any], llm: Any) -> None:
    """Write a note. `llm` has base_url, api_key and model."""
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        await client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": task["question"]}], max_tokens=64
        )
