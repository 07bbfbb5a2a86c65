"""Agent on the `ollama` client, without OpenAI's API: it asks for a sum.

If the reply has the wrong form, it asks once more.

    python agents/ollama_chat.py --host http://127.0.0.1:11434 --model llama3.2 \
        --question "What is 17 + 25?"
"""

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

try:
    import ollama
except ImportError as error:
    message = (
        f"agents/ollama_chat.py needs the ollama client ({error}); install it with the extra "
        "ollama: pip install -e '.[ollama]'"
    )
    if __name__ == "__main__":
        sys.exit(message)
    raise ImportError(message, name=error.name) from error

sys.path.insert(0, str(Path(__file__).parent))  # missing when this file is loaded by path
from sum_answers import HINT, answer_of, first_messages, reward

MAX_REPLIES = 2


async def solve(task: dict[str, Any], host: str, model: str) -> list[str]:
    """Return the model's replies in order."""
    messages = first_messages(task["question"])
    replies: list[str] = []
    async with ollama.AsyncClient(host=host) as client:
        while len(replies) < MAX_REPLIES:
            answer = await client.chat(model=model, messages=messages, options={"num_predict": 32})
            replies.append(answer.message.content or "")
            if answer_of(replies[-1]) is not None:
                break
            messages.append({"role": "assistant", "content": replies[-1]})
            messages.append({"role": "user", "content": HINT})
    return replies


async def run(task: dict[str, Any], llm: Any) -> dict[str, float]:
    """Return the last reply's reward, divided by the number of replies.

    The client adds /api/chat to its host, so the /v1 of OpenAI's base URL is removed.
    """
    replies = await solve(task, llm.base_url.removesuffix("/v1"), llm.model)
    return {"reward": reward(task, replies[-1]) / len(replies), "replies": len(replies)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a model for a sum, with one retry.")
    parser.add_argument(
        "--host", default="http://127.0.0.1:11434", help="URL of Ollama or a compatible server"
    )
    parser.add_argument("--model", default="policy")
    parser.add_argument("--question", required=True)
    args = parser.parse_args()
    try:
        print("\n".join(asyncio.run(solve({"question": args.question}, args.host, args.model))))
    except (ollama.ResponseError, ConnectionError) as error:
        parser.exit(1, f"{args.host} gave no answer: {error}\n")


if __name__ == "__main__":
    main()
