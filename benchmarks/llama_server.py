"""Peer of serve.py: llama.cpp's own server, started here and called over HTTP.

Calls do not stream, because a stream omits tokens that end inside a character, and an agent's next
turn needs all tokens. So token times come from the server: the first token when the prompt was
computed, the others evenly spaced after it.
"""

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import aiohttp
from workloads import MAX_LEN, SLOTS, THREADS, Reply, Result, measure_twice

from lightning_jax.system.network import free_port

START_S = 60.0


@dataclass(frozen=True)
class LlamaServer:
    """Running server."""

    url: str
    process: int


@asynccontextmanager
async def running(
    http: aiohttp.ClientSession, binary: str, weights: Path
) -> AsyncIterator[LlamaServer]:
    """Start the server and yield it once it answers.

    Raises RuntimeError if it does not in a minute.
    """
    port = free_port()
    command = [binary, "--model", str(weights), "--port", str(port), "--threads", str(THREADS)]
    command += ["--parallel", str(SLOTS), "--ctx-size", str(SLOTS * MAX_LEN)]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=quiet, stderr=quiet) as child:
        try:
            url = f"http://127.0.0.1:{port}"
            await _wait(http, f"{url}/health", child)
            yield LlamaServer(url, child.pid)
        finally:
            child.terminate()


async def _wait(http: aiohttp.ClientSession, url: str, child: subprocess.Popen) -> None:
    until = time.monotonic() + START_S
    while child.poll() is None and time.monotonic() < until:
        try:
            async with http.get(url) as response:
                if response.status == 200:
                    return
        except aiohttp.ClientConnectionError:
            pass
        await asyncio.sleep(0.2)
    raise RuntimeError(f"llama-server did not answer within {START_S:.0f} s ({child.args}).")


async def ask(
    http: aiohttp.ClientSession, server: LlamaServer, prompt: Sequence[int], new: int
) -> Reply:
    """Return a completion of exactly `new` tokens. Raises RuntimeError if it fails."""
    body = {
        **{"prompt": list(prompt), "n_predict": new, "ignore_eos": True, "return_tokens": True},
        **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    }
    started = time.perf_counter()
    async with http.post(f"{server.url}/completion", json=body) as response:
        answer = await response.json()
    took = time.perf_counter() - started
    if response.status != 200 or len(answer["tokens"]) != new:
        raise RuntimeError(f"llama-server failed with status {response.status}: {answer!r:.300}")
    first = took - answer["timings"]["predicted_ms"] / 1e3
    times = (first + (took - first) * i / (new - 1) for i in range(new))
    return Reply(tuple(answer["tokens"]), tuple(times))


async def measure(binary: str, weights: Path, workload: str) -> Result:
    """Measure one workload on a new server."""
    timeout = aiohttp.ClientTimeout(total=1800)
    async with (
        aiohttp.ClientSession(timeout=timeout) as http,
        running(http, binary, weights) as server,
    ):
        return await measure_twice(partial(ask, http, server), workload, server.process)
