"""Measure how much new weights slow the running requests.

    python benchmarks/swap.py [--model smollm2-135m-instruct] [--slots 16] [--swaps 8]

All slots generate while a thread keeps publishing weights, like a trainer. A token's gap is the
time since the previous one, as the median over slots, so there is one gap per decode step. The cost
of the exchange is the gap in which the version changes. The publishing thread makes the copy during
decode steps. Its cost is the sum of all gaps of a publication, each less the median gap without
one. The goal is less than one decode step for the exchange.
"""

import argparse
import asyncio
import statistics
import time
from dataclasses import dataclass

import jax

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.engine.generation import Generation
from lightning_jax.engine.loop import EngineLoop
from lightning_jax.engine.types import SamplingParams
from lightning_jax.models.formats.load import load_model

PROMPT_LEN, STEPS_BETWEEN = 128, 12  # decode steps between two publications


@dataclass(frozen=True)
class Gap:
    """One decode step: its end, its duration, and the version of the weights it used."""

    end: float
    seconds: float
    version: int


async def follow(generation: Generation) -> list[tuple[float, int]]:
    """Return (arrival time, version) of each token."""
    return [(time.perf_counter(), chunk.policy_versions[0]) async for chunk in generation]


async def publish(loop: EngineLoop, params: object, number: int, pause_s: float) -> list[float]:
    """Return the start time of each `load_weights` call.

    A call returns once the weights are copied.
    """
    begun = []
    for version in range(1, number + 1):
        await asyncio.sleep(pause_s)
        begun.append(time.perf_counter())
        await asyncio.to_thread(loop.load_weights, params, version)
        print(f"  published version {version} in {1e3 * (time.perf_counter() - begun[-1]):.0f} ms")
    return begun


def gaps_of(arrivals: list[list[tuple[float, int]]]) -> list[Gap]:
    """Return the steps in order, for slots that all took part in all of them."""
    ends = [statistics.median(time for time, _ in step) for step in zip(*arrivals, strict=True)]
    versions = [step[0][1] for step in zip(*arrivals, strict=True)]
    return [
        Gap(end, end - before, version)
        for before, end, version in zip(ends, ends[1:], versions[1:], strict=False)
    ]


async def measure(loop: EngineLoop, params: object, slots: int, swaps: int) -> None:
    steps = (swaps + 1) * 2 * STEPS_BETWEEN
    sampling = SamplingParams(max_tokens=steps, ignore_eos=True)

    def submit() -> list[Generation]:
        return [loop.submit([5 + i] * PROMPT_LEN, sampling) for i in range(slots)]

    quiet = gaps_of(await asyncio.gather(*map(follow, submit())))
    step_s = statistics.median(gap.seconds for gap in quiet)
    running = asyncio.gather(*map(follow, submit()))
    begun = await publish(loop, params, swaps, STEPS_BETWEEN * step_s)
    gaps = gaps_of(await running)
    exchanges, extras = [], []
    for start, version in zip(begun, range(1, swaps + 1), strict=True):
        beside = [gap for gap in gaps if gap.end > start and gap.version < version]
        change = next((gap for gap in gaps if gap.version == version), None)
        if change is None or not beside:
            raise RuntimeError("the responses ended before the last swap; use fewer --swaps.")
        exchanges.append(change.seconds - step_s)
        extras.append(sum(gap.seconds - step_s for gap in (*beside, change)))
    print(f"a decode step of {slots} slots: {1e3 * step_s:.1f} ms")
    for name, values in (("the exchange", exchanges), ("with the copy beside it", extras)):
        middle, worst = statistics.median(values), max(values)
        print(
            f"{name:24s} {1e3 * middle:7.1f} ms more ({middle / step_s:5.2f} steps), "
            f"at most {1e3 * worst:.1f} ms ({worst / step_s:.2f} steps)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--swaps", type=int, default=8)
    args = parser.parse_args()
    model = load_model(args.model)
    serve = ServeConfig(slots=args.slots, max_len=512)
    loop = EngineLoop(
        SlotPrograms(model.config, serve),
        model.params,
        version=0,
        tokenizer=model.tokenizer,
        serve=serve,
    )
    loop.warmup()
    loop.start()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    print(f"{args.model} on {jax.devices()[0].device_kind}: {size / 1e9:.2f} GB of weights")
    try:
        asyncio.run(measure(loop, model.params, args.slots, args.swaps))
    finally:
        loop.close()


if __name__ == "__main__":
    main()
