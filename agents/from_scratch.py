"""Agent without a framework: a plain loop around the `openai` client.

It asks for a sum. If the reply has the wrong form, it asks once more.

    python agents/from_scratch.py --base-url http://127.0.0.1:8000/v1 --question "What is 17 + 25?"
"""

import argparse
import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai

sys.path.insert(0, str(Path(__file__).parent))  # missing when this file is loaded by path
from sum_answers import HINT, SYSTEM, answer_of, first_messages, reward

MAX_REPLIES = 2


async def solve(task: dict[str, Any], llm: Any) -> list[str]:
    """Return the model's replies in order. `llm` has base_url, api_key and model.

    If it has a prompt `system`, that is the system message.
    """
    system = getattr(llm, "prompts", {}).get("system", SYSTEM)
    messages: list[Any] = first_messages(task["question"], system)
    replies: list[str] = []
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        while len(replies) < MAX_REPLIES:
            completion = await client.chat.completions.create(
                model=llm.model, messages=messages, max_tokens=32
            )
            replies.append(completion.choices[0].message.content or "")
            if answer_of(replies[-1]) is not None:
                break
            messages.append({"role": "assistant", "content": replies[-1]})
            messages.append({"role": "user", "content": HINT})
    return replies


async def run(task: dict[str, Any], llm: Any) -> dict[str, float]:
    """Return the last reply's reward, divided by the number of replies."""
    replies = await solve(task, llm)
    return {"reward": reward(task, replies[-1]) / len(replies), "replies": len(replies)}


def hint(task: dict[str, Any]) -> str:
    """Return the answer for a teacher to read (docs/howto/learn_from_hints.md)."""
    return f"Answer: {task['answer']}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a model for a sum, with one retry.")
    parser.add_argument("--base-url", required=True, help="base URL of an OpenAI-compatible server")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model", default="policy")
    parser.add_argument("--question", required=True)
    args = parser.parse_args()
    llm = SimpleNamespace(base_url=args.base_url, api_key=args.api_key, model=args.model)
    try:
        print("\n".join(asyncio.run(solve({"question": args.question}, llm))))
    except openai.OpenAIError as error:
        parser.exit(1, f"{args.base_url} gave no answer: {error}\n")


if __name__ == "__main__":
    main()
