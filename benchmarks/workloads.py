"""Agent workloads for a server: requests, replies and timing.

A server is called through an `Ask`, from token ids and a number of new tokens to a `Reply`. The
peers' scripts run in other environments, so only Python's standard library is imported here.

    W1  16 requests at once: 512-token prompts of which 384 are shared, 128 new tokens
    W2  8 agents at once, 4 turns each: 400 tokens first, 120 more a turn, 60 new tokens a turn
    W3  one stream: 64 prompt tokens, 128 new
    W4  64 requests at once: 32 prompt tokens, 32 new
    W5  4 streams: 64 prompt tokens, 128 new; after 2 s a request with 8,000 prompt tokens, 8 new
"""

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

FIRST_ID, LAST_ID = 100, 20_000  # ordinary tokens in the vocabularies of all model families
SLOTS, MAX_LEN, THREADS = 16, 1024, 2
LONG_SLOTS, LONG_LEN = 8, 8192  # of the workloads in LONG
LONG = ("W5",)  # only for servers over HTTP


@dataclass(frozen=True)
class Reply:
    """One response and the time of each token, in seconds after the request."""

    token_ids: tuple[int, ...]
    times: tuple[float, ...]


@dataclass(frozen=True)
class Result:
    """Cost of one workload."""

    seconds: float
    new_tokens: int
    first_token_s: tuple[float, ...]
    decode_s: float  # per token after the first, median over requests
    gap_s: float  # longest time between two tokens of a response
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
        agent_rng, replies = random.Random(seed), []
        prompt = tokens(agent_rng, 400)
        for _ in range(4):
            replies.append(await ask(prompt, 60))
            prompt = [*prompt, *replies[-1].token_ids, *tokens(agent_rng, 120)]
        return replies

    seeds = [rng.getrandbits(32) for _ in range(8)]
    return [reply for replies in await asyncio.gather(*map(agent, seeds)) for reply in replies]


async def one_stream(ask: Ask, rng: random.Random) -> list[Reply]:
    """W3."""
    return [await ask(tokens(rng, 64), 128)]


async def short_requests(ask: Ask, rng: random.Random) -> list[Reply]:
    """W4."""
    return await asyncio.gather(*(ask(tokens(rng, 32), 32) for _ in range(64)))


async def long_prompt(ask: Ask, rng: random.Random) -> list[Reply]:
    """W5."""

    async def late() -> Reply:
        await asyncio.sleep(2.0)
        return await ask(tokens(rng, 8000), 8)

    return await asyncio.gather(*(ask(tokens(rng, 64), 128) for _ in range(4)), late())


WORKLOADS = {
    **{"W1": group_sampling, "W2": agents, "W3": one_stream, "W4": short_requests},
    "W5": long_prompt,
}
SHORT = [name for name in WORKLOADS if name not in LONG]

# Prompt tokens to compute before the last request gets its first token. Only for workloads whose
# requests all fit in at once. A shared prefix is computed once.
PREFILLED = {"W1": 384 + 16 * 128, "W3": 64}


async def measure(ask: Ask, name: str, seed: int, process: int | None) -> Result:
    """Run a workload once. `process` is the server's process id if it is on this machine."""
    before = cpu_s(process)
    started = time.perf_counter()
    replies = await WORKLOADS[name](ask, random.Random(f"{name} {seed}"))
    seconds = time.perf_counter() - started
    after = cpu_s(process)
    gaps = [(reply.times[-1] - reply.times[0]) / (len(reply.times) - 1) for reply in replies]
    return Result(
        seconds=seconds,
        new_tokens=sum(len(reply.token_ids) for reply in replies),
        first_token_s=tuple(reply.times[0] for reply in replies),
        decode_s=quantile(gaps, 0.5),
        gap_s=max(b - a for reply in replies for a, b in pairwise(reply.times)),
        cpu_s=None if before is None or after is None else after - before,
        peak_mib=peak_mib(process),
    )


async def measure_twice(ask: Ask, name: str, process: int | None) -> Result:
    """Run a workload twice with different prompts, and return the second result."""
    await measure(ask, name, 0, process)
    return await measure(ask, name, 1, process)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile of the values for this share, with linear interpolation."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def cpu_s(process: int | None) -> float | None:
    """Return the CPU time of all threads of a process so far. Linux only."""
    path = Path(f"/proc/{process}/stat")
    if process is None or not path.exists():
        return None
    # The program name in parentheses may contain spaces.
    fields = path.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_mib(process: int | None) -> float | None:
    """Return the peak resident memory of a process. Linux only."""
    path = Path(f"/proc/{process}/status")
    if process is None or not path.exists():
        return None
    line = next(x for x in path.read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) / 1024
