"""Measure how many rollouts a second the gateway, the store and the runner carry.

    python benchmarks/load.py [--agents 1000] [--rollouts 3000] [--turns 3] [--repeats 1]
                              [--where process here] [--model smollm2-135m-instruct]

The engine is a stand-in that answers each call at once with 24 ready-made tokens. An agent sends
`--turns` chat calls that continue one conversation. Agents run in another process (`process`), as
those of workers do, or on their own event loop in this one (`here`). All records go to a store.

Columns: rollouts and calls per second; CPU of this process and of its main thread in milliseconds
per call, which includes the agents' own if they run here; the event loop's lag, which is how late a
timer that is due every 10 ms is served, counting all timers that one stall delays; resident memory
at the end; stored size per call. The agents' process looks up every 50th answer in the store before
the next call. `late` counts those whose span was not yet committed.
"""

import argparse
import asyncio
import contextlib
import json
import os
import sqlite3
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from stand_in import StandInEngine, ready_made
from workloads import quantile

from lightning_jax.engine.generation import Generation
from lightning_jax.engine.types import Completion, SamplingParams
from lightning_jax.gateway.app import Gateway
from lightning_jax.models.formats.load import load_model
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.rollouts.agents.event_loop import isolate_agent
from lightning_jax.rollouts.config import RolloutConfig
from lightning_jax.rollouts.runner import Runner, make_requests, run_requests
from lightning_jax.system.memory import freeze_objects, return_freed_memory
from lightning_jax.traces.store import Store
from lightning_jax.types import LLM, Task

WORDS = "SELECT name, count(*) FROM singer WHERE country = 'France' AND age > 20 GROUP BY name"
SYSTEM = "Write one SQL query that answers the question. Use only the tables that are given. " * 4
NUM_TOKENS, GROUP_SIZE, LOGPROB = 24, 8, -0.123456
CHECK_EVERY = 50  # answers
BEAT_S = 0.01
COLUMNS = (
    "agents in        agents  rollouts/s calls/s  cpu ms  main ms  lag p50    p99    MiB  KB late"
)


class AtOnce(StandInEngine):
    """Engine that answers every request with the same tokens in the next turn of the loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__("stand-in", tokenizer, num_slots=4096)
        self._chunks = ready_made(tokenizer, WORDS, LOGPROB)[:NUM_TOKENS]
        ids = tuple(chunk.token_ids[0] for chunk in self._chunks)
        logprobs, zeros = (LOGPROB,) * len(ids), (0,) * len(ids)
        text = "".join(chunk.text for chunk in self._chunks)
        self._completion = Completion(ids, text, logprobs, logprobs, zeros, "length")

    def answer(self, generation: Generation, sampling: SamplingParams) -> None:
        """Answer in the next turn of the event loop."""
        generation.event_loop.call_soon(self._answer, generation)

    def _answer(self, generation: Generation) -> None:
        for chunk in self._chunks:
            generation.receive(chunk, None)
        generation.receive(None, self._completion)


@dataclass
class Agents:
    """Agents of one process, which share a client. `late` counts answers that were not stored."""

    turns: int
    store: Path
    late: int = 0
    num_calls: int = 0
    _http: aiohttp.ClientSession | None = None
    _db: sqlite3.Connection | None = None

    async def run(self, url: str, key: str, number: int) -> float:
        """Return the reward of one rollout, after all of its calls."""
        if self._http is None or self._db is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
            self._http = aiohttp.ClientSession(connector=connector)
            self._db = sqlite3.connect(f"{self.store.as_uri()}?mode=ro", uri=True)
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"How many singers of country {number} are over 20?"},
        ]
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        for turn in range(self.turns):
            body = json.dumps({"model": "policy", "max_tokens": 64, "messages": messages})
            async with self._http.post(
                url + "/chat/completions", data=body, headers=headers
            ) as response:
                answer = json.loads(await response.read())
            assert response.status == 200, answer
            self.num_calls += 1
            if self.num_calls % CHECK_EVERY == 0:
                query = "SELECT COUNT(*) FROM spans WHERE attributes LIKE ? AND rollout_id = ?"
                rollout_id = url.rpartition("/rollout/")[2].partition("~")[0]
                (count,) = self._db.execute(query, (f"%{answer['id']}%", rollout_id)).fetchone()
                self.late += count != 1
            message = answer["choices"][0]["message"]
            messages += [
                {"role": "assistant", "content": message["content"]},
                {"role": "user", "content": f"Row {turn}: no such column. Correct the query."},
            ]
        return 1.0

    async def close(self) -> None:
        """Close the client."""
        if self._http is not None and self._db is not None:
            await self._http.close()
            self._db.close()


async def serve_agents(turns: int, store: Path) -> None:
    """Run agents for the parent process: a line of JSON for each rollout, in and out."""
    loop, agents = asyncio.get_running_loop(), Agents(turns, store)
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    running: set[asyncio.Task[None]] = set()

    async def one(number: int, url: str, key: str) -> None:
        reward = await agents.run(url, key, number)
        print(json.dumps([number, reward, agents.late]), flush=True)

    while line := await lines.readline():
        task = asyncio.create_task(one(*json.loads(line)))
        running.add(task)
        task.add_done_callback(running.discard)
    await agents.close()


@asynccontextmanager
async def in_another_process(agents: Agents) -> AsyncIterator[Any]:
    """Yield an agent whose rollouts run in a child process. Set `late` at the end."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--child", str(agents.turns), str(agents.store)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert child.stdin is not None and child.stdout is not None, "they are pipes"
    pipe_in, pipe_out = child.stdin, child.stdout
    waiting: dict[int, asyncio.Future[float]] = {}

    async def receive() -> None:
        while line := await pipe_out.readline():
            number, reward, agents.late = json.loads(line)
            waiting.pop(number).set_result(reward)

    async def agent(task: Task, llm: LLM) -> float:
        number = int(task["id"]) * GROUP_SIZE + len(waiting)
        while number in waiting:
            number += 1
        waiting[number] = asyncio.get_running_loop().create_future()
        pipe_in.write(json.dumps([number, llm.base_url, llm.api_key]).encode() + b"\n")
        return await waiting[number]

    receiving = asyncio.create_task(receive())
    try:
        yield agent
    finally:
        pipe_in.close()
        await child.wait()
        await receiving


@asynccontextmanager
async def in_this_process(agents: Agents) -> AsyncIterator[Any]:
    """Yield an agent that runs on an event loop of its own, as a run's agents do."""

    async def agent(task: Task, llm: LLM) -> float:
        if "close" in task:
            await agents.close()
            return 0.0
        return await agents.run(llm.base_url, llm.api_key, int(task["id"]))

    async with isolate_agent(agent) as isolated:
        yield isolated
        await isolated({"close": True}, LLM("", "", ""))


@asynccontextmanager
async def lags() -> AsyncIterator[list[float]]:
    """Yield a list that gets the lag in seconds of each timer while the block runs."""
    delays: list[float] = []

    async def beat() -> None:
        due = time.monotonic() + BEAT_S
        while True:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            now = time.monotonic()
            while due <= now:
                delays.append(now - due)
                due += BEAT_S

    beating = asyncio.create_task(beat())
    try:
        yield delays
    finally:
        beating.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await beating


def resident_mib() -> float:
    """Return the resident memory of this process in MiB. Linux only."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def measure(
    tokenizer: Tokenizer, where: str, num_agents: int, num_rollouts: int, turns: int
) -> str:
    """Run all rollouts once and return their row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.sqlite"
        store = Store(path)
        gateway = Gateway(AtOnce(tokenizer), store)  # pyright: ignore[reportArgumentType]
        config = RolloutConfig(concurrency=num_agents, timeout_s=600, call_timeout_s=300)
        tasks: list[Task] = [{"id": str(i)} for i in range(-(-num_rollouts // GROUP_SIZE))]
        agents = Agents(turns, path)
        place = {"process": in_another_process, "here": in_this_process}[where]
        async with gateway, place(agents) as agent:
            runner = Runner(agent, gateway, config, 0)
            warm = make_requests(tasks[:2], "eval", 0, GROUP_SIZE)
            await run_requests(warm, runner)  # caches, lazily imported modules
            requests = make_requests(tasks, "train", 0, GROUP_SIZE)[:num_rollouts]
            with freeze_objects():
                cpu, main, begun = time.process_time(), time.thread_time(), time.monotonic()
                async with lags() as delays:
                    rollouts = await run_requests(requests, runner)
                seconds = time.monotonic() - begun
                cpu, main = time.process_time() - cpu, time.thread_time() - main
                mib = resident_mib()
        assert {rollout.status for rollout in rollouts} == {"scored"}, "a rollout failed"
        calls = num_rollouts * turns
        assert store.num_calls() == calls + len(warm) * turns, "a call was not recorded"
        store.close()
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
    stored = size / (calls + len(warm) * turns)
    return (
        f"{where:16s} {num_agents:6d} {num_rollouts / seconds:11.0f} {calls / seconds:7.0f} "
        f"{1e3 * cpu / calls:7.2f} {1e3 * main / calls:8.2f} {1e3 * quantile(delays, 0.5):8.1f} "
        f"{1e3 * quantile(delays, 0.99):6.1f} {mib:6.0f} {stored / 1e3:3.1f} {agents.late:4d}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--agents", type=int, nargs="+", default=[1000, 16])
    parser.add_argument("--rollouts", type=int, default=3000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument(
        "--where", nargs="+", choices=("process", "here"), default=["process", "here"]
    )
    args = parser.parse_args()
    tokenizer = load_model(args.model).tokenizer
    return_freed_memory()
    print(COLUMNS)
    for _ in range(args.repeats):
        for where in args.where:
            for agents in args.agents:
                print(
                    asyncio.run(measure(tokenizer, where, agents, args.rollouts, args.turns)),
                    flush=True,
                )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        asyncio.run(serve_agents(int(sys.argv[2]), Path(sys.argv[3])))
    else:
        main()
