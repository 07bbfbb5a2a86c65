"""Compare wordings of a hint by what the untrained model earns with the hint in its own prompt.

A teacher that reads a hint (docs/howto/learn_from_hints.md) knows no more than this reward shows.
The tasks are generated text-to-SQL questions, and only the writer's first reply counts.

    python experiments/hint_wordings.py [--tasks 40] [--temperature 0] [--wording line]
        [--model smollm2-135m-instruct]
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import openai
from sweep import count, mean_and_error, refuse

import lightning_jax as lj

sys.path.insert(0, str(Path(__file__).parent / "data"))
sys.path.insert(0, str(Path(__file__).parents[1] / "agents"))
from spider import load_spider
from spider_sql import first_messages
from sqlite_sandbox import extract_sql, reward

# What follows the question, after an empty line.
WORDINGS: Mapping[str, str] = {
    "none": "",
    "query": "{query};",
    "answer": "Answer: {query};\nCopy this answer.",
    "say": "Say: {query};",
    "exactly": "Reply with exactly this query and nothing else:\n{query};",
    "repeat": "Repeat this query word by word:\n{query};",
    "reply": "Your reply is this query and nothing else. Repeat it word by word:\n{query};",
    "line": "Your whole reply is this one line. Repeat it word by word:\n{query};",
}
MAX_TOKENS = 48  # as in configs/spider_cpu.yaml
MAX_LEN = 2048  # the tiny model has a token for each byte


async def ask(
    client: openai.AsyncOpenAI, task: lj.Task, wording: str, temperature: float
) -> tuple[float, float]:
    """Return (the reward of the first reply, 1.0 if the reply is the gold query alone)."""
    query = task["query"].rstrip("; ")
    messages: list[Any] = first_messages(task)
    messages[-1]["content"] = f"{messages[-1]['content']}\n\n{wording.format(query=query)}".rstrip()
    completion = await client.chat.completions.create(
        model="policy",
        messages=messages,
        max_tokens=MAX_TOKENS,
        temperature=temperature,
    )
    reply = completion.choices[0].message.content or ""
    earned = await asyncio.to_thread(reward, task, extract_sql(reply))
    return earned, float(reply.strip().rstrip("; ") == query)


async def compare(
    tasks: Sequence[lj.Task], names: Sequence[str], model: str, temperature: float
) -> None:
    """Print a row for each wording: its reward and the share of bare replies."""
    loaded = lj.load_model(model)
    serve = lj.ServeConfig(slots=16, max_len=MAX_LEN)
    print("| wording | reward | the query alone |\n|---|---|---|", flush=True)
    async with (
        lj.Engine(loaded, serve=serve) as engine,
        lj.Gateway(engine, records=False) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.api_key) as client,
    ):
        for name in names:
            wording = WORDINGS[name]
            answers = await asyncio.gather(
                *(ask(client, task, wording, temperature) for task in tasks)
            )
            rewards, bare = zip(*answers, strict=True)
            print(
                f"| {name} | {mean_and_error(rewards)} | {statistics.fmean(bare):.3f} |",
                flush=True,
            )


def temperature(text: str) -> float:
    """Return the number that a flag has. Raises ValueError unless the engine can sample at it."""
    return lj.SamplingParams(temperature=float(text)).temperature


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", type=count, default=40, help="number of them (%(default)s)")
    parser.add_argument(
        "--temperature", type=temperature, default=0.0, help="0 to 10; 0 is greedy (%(default)s)"
    )
    parser.add_argument("--wording", action="append", choices=WORDINGS, help="default: all")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        tasks, _ = load_spider(None, "dev", cache, max_schema_chars=700)
        random.Random(0).shuffle(tasks)
        names = args.wording or list(WORDINGS)
        lj.keep_compiled()
        try:
            asyncio.run(compare(tasks[: args.tasks], names, args.model, args.temperature))
        except lj.UserError as error:
            refuse(error)
        except KeyboardInterrupt:
            sys.exit("stopped; the rows above are complete")


if __name__ == "__main__":
    main()
