"""How fast is the server on the work that agents give it, next to others in the same run?

    python benchmarks/serve.py [--model NAME] [--only W1 W2] [--peer NAME=URL ...]

Our server runs in a process of its own, and so does whatever answers at a peer's URL, which must
speak OpenAI's completions with token ids as prompts and `ignore_eos`. All get the same prompts, the
same numbers of tokens and temperature 1. The workloads:

    W1  16 requests at once: 512-token prompts of which 384 are shared, 128 new tokens
    W2  8 agents at once, 4 turns each: 400 tokens first, 120 more a turn, 60 new tokens a turn
    W3  one stream: 64 prompt tokens, 128 new
    W4  64 requests at once: 32 prompt tokens, 32 new

Each workload is run twice and the second time is reported, so that what is compiled or loaded at
first use does not count; prompts differ between the two, so that nothing of them is cached.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import psutil

FIRST_ID, LAST_ID = 100, 20_000  # ordinary tokens in every vocabulary of the model families
SLOTS, MAX_LEN = 16, 1024


@dataclass(frozen=True)
class Target:
    """A server that is measured."""

    name: str
    url: str  # with /v1
    key: str
    model: str
    process: psutil.Process | None = None  # where we started it


@dataclass(frozen=True)
class Reply:
    """One streamed response: when each of its tokens came, in seconds after the request."""

    token_ids: tuple[int, ...]
    times: tuple[float, ...]


@dataclass(frozen=True)
class Result:
    """What one workload took."""

    seconds: float
    new_tokens: int
    first_token_s: tuple[float, ...]
    cpu_s: float | None
    peak_mib: float | None


Ask = Callable[[Sequence[int], int], Awaitable[Reply]]


def tokens(rng: random.Random, number: int) -> list[int]:
    return [rng.randrange(FIRST_ID, LAST_ID) for _ in range(number)]


async def group_sampling(ask: Ask, rng: random.Random) -> list[Reply]:
    """W1."""
    shared = tokens(rng, 384)
    prompts = [[*shared, *tokens(rng, 128)] for _ in range(16)]
    return await asyncio.gather(*(ask(prompt, 128) for prompt in prompts))


async def agents(ask: Ask, rng: random.Random) -> list[Reply]:
    """W2."""

    async def agent(seed: int) -> list[Reply]:
        own, replies = random.Random(seed), []
        prompt = tokens(own, 400)
        for _ in range(4):
            replies.append(await ask(prompt, 60))
            prompt = [*prompt, *replies[-1].token_ids, *tokens(own, 120)]
        return replies

    seeds = [rng.getrandbits(32) for _ in range(8)]
    return [reply for replies in await asyncio.gather(*map(agent, seeds)) for reply in replies]


async def one_stream(ask: Ask, rng: random.Random) -> list[Reply]:
    """W3."""
    return [await ask(tokens(rng, 64), 128)]


async def short_requests(ask: Ask, rng: random.Random) -> list[Reply]:
    """W4."""
    return await asyncio.gather(*(ask(tokens(rng, 32), 32) for _ in range(64)))


WORKLOADS = {"W1": group_sampling, "W2": agents, "W3": one_stream, "W4": short_requests}


async def request(
    http: aiohttp.ClientSession, target: Target, prompt: Sequence[int], new: int
) -> Reply:
    """One completion of exactly `new` tokens, streamed. Raises RuntimeError where it fails."""
    body = {
        **{"model": target.model, "prompt": list(prompt), "max_tokens": new, "temperature": 1.0},
        **{"stream": True, "ignore_eos": True, "return_token_ids": True},
    }
    started, ids, times = time.perf_counter(), [], []
    headers = {"Authorization": f"Bearer {target.key}"}
    async with http.post(f"{target.url}/completions", json=body, headers=headers) as response:
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"{target.name} failed: {event['error']}")
            found = [i for choice in event["choices"] for i in choice.get("token_ids") or ()]
            ids += found
            times += [time.perf_counter() - started] * len(found)
        if response.status != 200 or len(ids) != new:
            raise RuntimeError(
                f"{target.name} gave {len(ids)} tokens with status {response.status}; expected "
                f"{new} tokens with their ids."
            )
    return Reply(tuple(ids), tuple(times))


async def measure(target: Target, name: str, seed: int) -> Result:
    """One run of a workload."""
    timeout = aiohttp.ClientTimeout(total=1800)
    async with aiohttp.ClientSession(timeout=timeout, read_bufsize=2**20) as http:

        async def ask(prompt: Sequence[int], new: int) -> Reply:
            return await request(http, target, prompt, new)

        before = _cpu_s(target.process)
        started = time.perf_counter()
        replies = await WORKLOADS[name](ask, random.Random(f"{name} {seed}"))
        seconds = time.perf_counter() - started
        after = _cpu_s(target.process)
    return Result(
        seconds=seconds,
        new_tokens=sum(len(reply.token_ids) for reply in replies),
        first_token_s=tuple(reply.times[0] for reply in replies),
        cpu_s=None if before is None or after is None else after - before,
        peak_mib=_peak_mib(target.process),
    )


def _cpu_s(process: psutil.Process | None) -> float | None:
    if process is None:
        return None
    times = process.cpu_times()
    return times.user + times.system


def _peak_mib(process: psutil.Process | None) -> float | None:
    """The most memory that was resident; Linux only."""
    status = Path(f"/proc/{process.pid}/status") if process else None
    if status is None or not status.exists():
        return None
    line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def start_ours(model: str) -> tuple[Target, subprocess.Popen]:
    """Our own server, once it answers."""
    command = [sys.executable, "-m", "lightning_jax", "serve", "--model", model, "--port", "0"]
    command += ["--slots", str(SLOTS), "--max-len", str(MAX_LEN), "--api-key", "bench"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ.copy())
    assert child.stdout is not None, "its output is piped"
    line = child.stdout.readline()
    if " answers at " not in line:
        child.kill()
        raise RuntimeError(f"our server did not start: {line!r}")
    url = line.split(" answers at ")[1].split()[0]
    return Target("lightning_jax", url, "bench", "policy", psutil.Process(child.pid)), child


def row(target: Target, name: str, found: Result, ours: float | None) -> str:
    """One line of the table."""
    first = np.array(found.first_token_s)
    cpu = "-" if found.cpu_s is None else f"{found.cpu_s:.1f}"
    peak = "-" if found.peak_mib is None else f"{found.peak_mib:.0f}"
    ratio = "-" if ours is None else f"{found.seconds / ours:.2f}"
    return (
        f"{name:4} {target.name:16} {found.seconds:8.2f} {ratio:>6} "
        f"{found.new_tokens / found.seconds:9.1f} {np.median(first):8.3f} "
        f"{np.quantile(first, 0.99):8.3f} {cpu:>7} {peak:>9}"
    )


async def compare(targets: Sequence[Target], names: Sequence[str]) -> None:
    """Prints the table; the ratio is that of a peer's seconds to ours."""
    print(
        f"{'':4} {'server':16} {'seconds':>8} {'ratio':>6} {'tokens/s':>9} {'ttft p50':>8} "
        f"{'p99':>8} {'cpu s':>7} {'peak MiB':>9}"
    )
    for name in names:
        ours = None
        for target in targets:
            await measure(target, name, seed=0)
            found = await measure(target, name, seed=1)
            ours = ours or found.seconds
            print(row(target, name, found, ours), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare servers on the work of agents.")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=URL[,MODEL[,KEY]]",
        help="another server, its URL with /v1",
    )
    args = parser.parse_args()
    peers = []
    for text in args.peer:
        name, equals, place = text.partition("=")
        url, model, key = (*place.split(","), "", "")[:3]
        if not equals or not url.startswith("http"):
            parser.error(
                f"--peer is {text!r}; expected NAME=URL, such as vllm=http://HOST:8000/v1."
            )
        peers.append(Target(name, url.rstrip("/"), key or "none", model or args.model))
    ours, child = start_ours(args.model)
    try:
        asyncio.run(compare([ours, *peers], args.only))
    finally:
        child.terminate()
        child.wait(timeout=60)


if __name__ == "__main__":
    main()
