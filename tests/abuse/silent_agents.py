"""Agents of workers: honest ones, and those that silence the worker that they run in."""

import asyncio
import json
import os
import pathlib
import re
import signal
import urllib.request

CATASTROPHE = "a" * 60 + "!"  # which the expression below takes years to refuse


async def run(task, llm):
    """Call the policy, and do what the task says."""
    await asyncio.to_thread(_call, llm, task["id"])
    kind = task["kind"]
    if kind == "regular_expression":
        await asyncio.sleep(0.1)  # others have begun
        re.match(r"(a+)+$", CATASTROPHE)  # it holds the interpreter
    elif kind == "stops":
        stopped = pathlib.Path(task["notes"]) / "stopped"
        if not stopped.exists():  # its machine does so once, not the task
            stopped.touch()
            os.kill(os.getpid(), signal.SIGSTOP)
    else:
        await asyncio.sleep(0.2)
    return 0.5


def _call(llm, text):
    body = {"model": llm.model, "messages": [{"role": "user", "content": text}], "max_tokens": 2}
    request = urllib.request.Request(
        f"{llm.base_url}/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {llm.api_key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        answer.read()
