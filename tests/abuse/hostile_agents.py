"""The corpus of hostile agents: `run` is honest or not by the task's `kind`. Standard library only,
so that other interpreters can run it.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

HONEST = "honest"


def _post(llm, path, body, timeout=60):
    request = urllib.request.Request(
        llm.base_url + path,
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {llm.api_key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.loads(answer.read())


def _chat(llm, words, max_tokens=4, **fields):
    messages = [{"role": "user", "content": words}]
    body = {"model": llm.model, "messages": messages, "max_tokens": max_tokens, **fields}
    return _post(llm, "/chat/completions", body)


def honest(task, llm):
    """Two calls, and a reward that depends on the task alone."""
    for words in ("one", "two"):
        _chat(llm, words)
    return 0.5


# Agents in the trainer's process


class Unspeakable(BaseException):
    """An exception that cannot say what it is."""

    def __str__(self):
        raise RuntimeError("no words")

    __repr__ = __str__


def raises_group_without_words(task, llm):
    raise BaseExceptionGroup("", [ExceptionGroup("", [ValueError()]), Unspeakable()])


def raises_generator_exit(task, llm):
    raise GeneratorExit


def raises_unspeakable(task, llm):
    raise Unspeakable


def raises_surrogate(task, llm):
    raise ValueError("half of \ud83d")


def leaves(task, llm):
    sys.exit(3)


def returns_infinity_nearly(task, llm):
    return 1e308


def returns_hundred_thousand_metrics(task, llm):
    return {"reward": 1.0} | {f"metric_{n}": float(n) for n in range(100_000)}


def returns_long_metric_name(task, llm):
    return {"reward": 1.0, "m" * 1_000_000: 1.0}


def floods(task, llm):
    def call(n):
        with contextlib.suppress(OSError):
            _chat(llm, f"flood {n}", max_tokens=50)

    with ThreadPoolExecutor(64) as pool:
        list(pool.map(call, range(128)))
    return 1.0


def claims_that_infrastructure_failed(task, llm):
    with contextlib.suppress(OSError):
        _chat(llm, "x" * 5_000_000)
    raise RuntimeError("I broke off")


def ignores_its_deadline(task, llm):
    end = time.monotonic() + 18.0
    while time.monotonic() < end:
        with contextlib.suppress(Exception):
            time.sleep(0.2)
    return 1.0


def posts_reward_after_reward(task, llm):
    for value in (1e300, 1e308, -1e308):
        with contextlib.suppress(OSError):
            _post(llm, "/reward", {"reward": value})
    return None


# Agents that are programs


def eats_memory(task, llm):
    held = []
    while True:
        held.append(bytearray(50_000_000))


def starts_many_processes(task, llm):
    started = []
    with contextlib.suppress(OSError):
        for _ in range(2_000):
            started.append(subprocess.Popen(["sleep", "30"]))
    for each in started:
        each.kill()
        each.wait()
    raise RuntimeError(f"started {len(started)}")


def leaves_a_process_behind(task, llm):
    subprocess.Popen(["sleep", "300.125"], start_new_session=True, env={"PATH": os.environ["PATH"]})
    return 0.25


def reads_secrets(task, llm):
    return float("SECRET_OF_THE_TRAINER" in os.environ)


def kills_itself(task, llm):
    os.kill(os.getpid(), 9)


def run(task, llm):
    """A plain function: the runner gives it a thread of its own."""
    return globals()[task["kind"]](task, llm)


async def run_async(task, llm):
    """A coroutine function for what only coroutines can do."""
    if task["kind"] == "cancels_itself":
        asyncio.current_task().cancel()  # pyright: ignore[reportOptionalMemberAccess]
        await asyncio.sleep(1)
    if task["kind"] == "leaves_a_task_that_exits":
        asyncio.get_running_loop().call_soon(sys.exit, 4)
        await asyncio.sleep(0.05)
    return await asyncio.to_thread(honest, task, llm)
