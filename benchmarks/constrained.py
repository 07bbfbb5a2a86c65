"""Measure how much one constrained request slows the other requests.

    python benchmarks/constrained.py [--model smollm2-135m-instruct] [--slots 8] [--tokens 96]

All slots but one generate plain text, first alone and then next to one response that follows a JSON
schema. The output has decode steps per second of the plain requests, and tokens per second of the
constrained one. Each is given as a median over rounds.
"""

import argparse
import asyncio
import json
import statistics
import time

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.engine.generation import Generation
from lightning_jax.engine.grammar.compiler import grammar, json_schema
from lightning_jax.engine.loop import EngineLoop
from lightning_jax.engine.types import SamplingParams
from lightning_jax.models.formats.load import load_model
from lightning_jax.testing.tiny import tiny_model

# Strings of unlimited length keep the response constrained while the others run.
SCHEMA = {"type": "array", "items": {"type": "string", "minLength": 20}, "minItems": 200}


async def follow(generation: Generation) -> list[float]:
    """Return the arrival time of each token."""
    return [time.perf_counter() async for _ in generation]


def rate(arrivals: list[float]) -> float:
    return (len(arrivals) - 1) / (arrivals[-1] - arrivals[0])


async def measure(loop: EngineLoop, num_plain: int, tokens: int, constrained: bool) -> list[float]:
    """Return the plain requests' steps/s, and the constrained one's tokens/s or 0."""
    plain = SamplingParams(max_tokens=tokens, ignore_eos=True)
    with_schema = SamplingParams(max_tokens=4 * tokens, grammar=grammar(json_schema(SCHEMA)))
    generation = loop.submit([7] * 32, with_schema) if constrained else None
    beside = asyncio.create_task(follow(generation)) if generation else None
    if beside:
        await asyncio.sleep(0.2)  # until it has started
    running = [follow(loop.submit([5 + i] * 32, plain)) for i in range(num_plain)]
    arrivals = await asyncio.gather(*running)
    steps_s = statistics.median(map(rate, arrivals))
    if not (generation and beside):
        return [steps_s, 0.0]
    generation.cancel()
    begin, end = arrivals[0][0], arrivals[0][-1]
    concurrent = [moment for moment in await beside if begin <= moment <= end]
    return [steps_s, rate(concurrent)]


async def run(loop: EngineLoop, slots: int, tokens: int, rounds: int) -> None:
    await loop.prepare(grammar(json_schema(SCHEMA)))
    times: dict[bool, list[list[float]]] = {False: [], True: []}
    for constrained in (False, True) * (rounds + 1):  # the first round is a warm-up
        times[constrained].append(await measure(loop, slots - 1, tokens, constrained))
    for constrained, rows in times.items():
        steps, others = zip(*rows[1:], strict=True)
        print(
            json.dumps(
                {
                    "constrained": constrained,
                    "plain_steps_s": round(statistics.median(steps), 2),
                    "constrained_tokens_s": round(statistics.median(others), 2),
                    "rounds": [round(value, 2) for value in steps],
                }
            )
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m-instruct", help="or tiny")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--max-len", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    model = tiny_model() if args.model == "tiny" else load_model(args.model)
    serve = ServeConfig(slots=args.slots, max_len=args.max_len)
    loop = EngineLoop(SlotPrograms(model.config, serve), model.params, 0, model.tokenizer, serve)
    loop.warmup()
    loop.start()
    try:
        asyncio.run(run(loop, args.slots, args.tokens, args.rounds))
    finally:
        loop.close()


if __name__ == "__main__":
    main()
