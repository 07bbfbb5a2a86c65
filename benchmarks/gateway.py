"""Measure the gateway's cost per request and per token, without the engine.

    python benchmarks/gateway.py [--model smollm2-135m-instruct] [--requests 200]

The gateway runs in this process, over a loop that returns ready-made tokens at once, and records
every call in a store. The client is another process with 8 concurrent calls. Each 8 calls share a
prompt of about 300 tokens, like the rollouts of a group. The result is CPU time of this process.
The cost per request is that of a response with one token. The cost per token comes from the
difference to 101 tokens. The goal is 1 ms per request and 50 us per token.
"""

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from stand_in import StandInEngine, ready_made

from lightning_jax.engine.generation import Generation
from lightning_jax.engine.response import Chunk
from lightning_jax.engine.types import Completion, SamplingParams
from lightning_jax.gateway.app import Gateway, RolloutSettings
from lightning_jax.models.formats.load import LoadedModel, load_model
from lightning_jax.system.memory import freeze_objects
from lightning_jax.traces.store import Store

WORDS = "SELECT count(*) FROM singer WHERE country = 'France' and age > 20 order by name"
FEW, MANY = 1, 101
CLIENT = """
import asyncio, sys, aiohttp
async def main(url, requests, tokens, stream):
    places = asyncio.Semaphore(8)
    def body(group):
        return {"model": "policy", "max_tokens": tokens, "stream": stream, "messages": [
            {"role": "system", "content": "Answer with one query. " * 20},
            {"role": "user", "content": f"Which {group} singers are from France? " * 20}]}
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer bench"}) as http:
        async def call(index):
            async with places, http.post(url + "/chat/completions",
                    json={**body(index // 8), "seed": index}) as response:
                await response.read()
                assert response.status == 200, await response.text()
        await asyncio.gather(*map(call, range(requests)))
asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "stream"))
"""


class ReadyMade(StandInEngine):
    """Engine that answers every request with the same tokens, one per turn of the event loop."""

    def __init__(self, model: LoadedModel, chunks: Sequence[Chunk]) -> None:
        super().__init__(model.name, model.tokenizer, num_slots=16)
        self._chunks = chunks
        self._tasks: set[asyncio.Task[None]] = set()

    def answer(self, generation: Generation, sampling: SamplingParams) -> None:
        """Answer with `sampling.max_tokens` tokens."""
        task = asyncio.create_task(self._answer(generation, sampling.max_tokens))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, generation: Generation, number: int) -> None:
        chunks = list(itertools.islice(itertools.cycle(self._chunks), number))
        for chunk in chunks:
            generation.receive(chunk, None)
            await asyncio.sleep(0)
        ids = tuple(chunk.token_ids[0] for chunk in chunks)
        zeros, text = (0.0,) * number, "".join(chunk.text for chunk in chunks)
        generation.receive(None, Completion(ids, text, zeros, zeros, (0,) * number, "length"))


async def cpu_s(gateway: Gateway, requests: int, tokens: int, *, stream: bool) -> float:
    """Return this process's CPU seconds per request, for requests in a new rollout."""
    name = f"{tokens}-{stream}-{time.monotonic_ns()}"
    llm = gateway.open_rollout(RolloutSettings(name, 0))
    before = time.process_time()
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CLIENT, llm.base_url),
        *(str(requests), str(tokens), "stream" if stream else "whole"),
    )
    if await client.wait():
        raise RuntimeError("the client failed; its message is above.")
    spent = time.process_time() - before
    gateway.close_rollout(name)
    return spent / requests


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--requests", type=int, default=200)
    args = parser.parse_args()
    model = load_model(args.model)
    chunks = ready_made(model.tokenizer, WORDS)
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "store.sqlite")
        gateway = Gateway(ReadyMade(model, chunks), store)  # pyright: ignore[reportArgumentType]
        await gateway.start()
        try:
            with freeze_objects():
                print("CPU of the gateway   a request    a token")
                for stream in (False, True):
                    await cpu_s(gateway, 20, MANY, stream=stream)  # warm-up
                    few = await cpu_s(gateway, args.requests, FEW, stream=stream)
                    many = await cpu_s(gateway, args.requests, MANY, stream=stream)
                    a_token = (many - few) / (MANY - FEW)
                    kind = "streamed" if stream else "whole"
                    print(f"{kind:18s} {1e3 * few:8.2f} ms {1e6 * a_token:7.1f} us")
        finally:
            await gateway.close()
            store.close()


if __name__ == "__main__":
    asyncio.run(main())
