"""Agent that writes a note in one call and returns no reward: components of `rewards` score it.

python agents/note_writer.py --base-url http://127.0.0.1:8000/v1 --question "Write about rain."
"""

import argparse
import asyncio
from types import SimpleNamespace
from typing import Any

import openai


async def write(task: dict[str, Any], llm: Any) -> str:
    """Return the note. `llm` has base_url, api_key and model."""
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        completion = await client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": task["question"]}], max_tokens=64
        )
    return completion.choices[0].message.content or ""


async def run(task: dict[str, Any], llm: Any) -> None:
    """Write a note."""
    await write(task, llm)


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a model for a note.")
    parser.add_argument("--base-url", required=True, help="base URL of an OpenAI-compatible server")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model", default="policy")
    parser.add_argument("--question", required=True)
    args = parser.parse_args()
    llm = SimpleNamespace(base_url=args.base_url, api_key=args.api_key, model=args.model)
    try:
        print(asyncio.run(write({"question": args.question}, llm)))
    except openai.OpenAIError as error:
        parser.exit(1, f"{args.base_url} gave no answer: {error}\n")


if __name__ == "__main__":
    main()
