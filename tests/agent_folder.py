"""Folder of a user with an agent, tasks and settings, for the commands that run an agent."""

from pathlib import Path
from typing import Any

import yaml

from lightning_jax.testing.tiny import TINY_RUN

AGENT = '''
import openai


async def run(task, llm):
    """Ask once; the reply should be `right`."""
    if task["question"] == "broken":
        raise KeyError("no such tool")
    if task["question"] == "silent":
        return 1.0
    async with openai.AsyncOpenAI(
        base_url=llm.base_url, api_key=llm.api_key, max_retries=0
    ) as client:
        reply = await client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": task["question"]}], max_tokens=4
        )
    return {"reward": float(reply.choices[0].message.content == "right"), "own": 0.25}
'''
QUESTIONS = ("hello", "broken", "silent", "1 + 1?", "2 + 2?")
SETTINGS: dict[str, Any] = TINY_RUN | {
    "run_dir": "run",
    "model.name": "tiny",
    "agent.function": "agent.py:run",
    "data.root": ".",
    "eval.by": "kind",
}


def write_folder(folder: Path) -> None:
    """Write agent.py, config.yaml, train.jsonl with QUESTIONS, and dev.jsonl with sums."""
    (folder / "agent.py").write_text(AGENT)
    tasks = [f'{{"question": "{text}", "id": "q-{text}"}}\n' for text in QUESTIONS]
    (folder / "train.jsonl").write_text("".join(tasks))
    sums = [
        f'{{"question": "{n} + {n}", "id": "d{n}", "kind": "{("even", "odd")[n % 2]}"}}\n'
        for n in range(6)
    ]
    (folder / "dev.jsonl").write_text("".join(sums))
    nested: dict[str, Any] = {}
    for key, value in SETTINGS.items():
        *sections, name = key.split(".")
        at = nested
        for section in sections:
            at = at.setdefault(section, {})
        at[name] = yaml.safe_load(str(value))
    (folder / "config.yaml").write_text(yaml.safe_dump(nested))
