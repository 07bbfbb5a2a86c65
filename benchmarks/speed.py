"""Measure a decode step, a prefill and a gradient against the matrix products that they need.

Each figure is the median of several runs. The limit is measured in the same process: the time that
one large float32 (or bfloat16) matrix product takes for the same number of floating-point
operations.

    python benchmarks/speed.py [--model smollm2-135m-instruct] [--slots 16] [--context 256]
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.device.slots import Fill, SlotPrograms
from lightning_jax.engine.device.table import SlotTable
from lightning_jax.engine.types import SamplingParams
from lightning_jax.models.formats.load import load_model
from lightning_jax.rl.batches.batching import make_batches
from lightning_jax.rl.batches.microbatches import bundles
from lightning_jax.rl.config import BatchConfig
from lightning_jax.rl.losses.objectives import policy_objective
from lightning_jax.rl.sequence import TrainingSequence
from lightning_jax.rl.update.train_step import make_train_functions, zero_accumulators


def median_s(run: Callable[[], Any], repeats: int) -> float:
    """Return the median seconds of `run` after one run that compiles."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def flops_per_s(dtype: Any) -> float:
    """Return the FLOP/s of a product of two 2048 x 2048 matrices, with float32 sums."""
    x = jax.random.normal(jax.random.key(0), (2048, 2048), dtype)
    product = jax.jit(functools.partial(jnp.dot, preferred_element_type=jnp.float32))
    return 2 * 2048**3 / median_s(lambda: product(x, x), 5)


def report(name: str, seconds: float, tokens: int, flops: float, rate: float) -> None:
    limit = flops / rate
    print(
        f"{name:32s} {1e3 * seconds:9.1f} ms {tokens / seconds:9.0f} tokens/s   "
        f"limit {1e3 * limit:8.1f} ms   ratio {seconds / limit:5.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--context", type=int, default=256)
    args = parser.parse_args()
    model = load_model(args.model, args.dtype)
    size = sum(leaf.size for leaf in jax.tree.leaves(model.params))
    body = size - model.params["embed"]["embedding"].size
    rate = flops_per_s(jnp.dtype(args.dtype))
    print(f"{args.model} {args.dtype} on {jax.devices()[0].device_kind}: {rate / 1e9:.0f} GFLOP/s")
    serve = ServeConfig(slots=args.slots, max_len=2 * args.context, prefill_buckets=(args.context,))
    engine = SlotPrograms(model.config, serve, dtype=args.dtype)
    params, ids = engine.put_on_mesh(model.params), list(range(5, 5 + args.context))
    box, fills = [engine.init_state()], [Fill(0, 0, ids)]

    def fill() -> Any:
        cache = engine.prefill(params, box[0].cache, fills)
        box[0] = replace(box[0], cache=cache)
        return cache

    seconds = median_s(fill, 5)
    report(f"prefill of {args.context}", seconds, args.context, 2 * body * args.context, rate)
    table = SlotTable(args.slots)
    for slot in range(args.slots):
        table.begin(slot, 7, args.context - 64, SamplingParams(), slot)

    def step() -> Any:
        box[0], sampled = engine.generate(params, box[0], table, range(args.slots))
        return sampled

    seconds = median_s(step, 20)
    report(f"decode step of {args.slots} slots", seconds, args.slots, 2 * size * args.slots, rate)
    # Sixteen responses of 32 tokens to one prompt, like a GRPO group.
    sequences = [
        TrainingSequence(tuple(ids), tuple(range(9 + k, 41 + k)), (-1.0,) * 32, 1.0, 1 / 512)
        for k in range(16)
    ]
    config = BatchConfig(rows=1, row_len=1024, max_targets=512, head_chunk=128)
    (batch,), stats = make_batches(sequences, config)
    objective = policy_objective(clip_low=0.2, clip_high=0.2)
    functions = make_train_functions(model.config, optax.identity(), objective, head_chunk=128)
    sums = [zero_accumulators(functions, model.params)]

    def grads() -> Any:
        sums[0] = functions.grads_fn(model.params, *sums[0], *bundles([batch])[0], None)
        return sums[0][1]

    nodes = int(stats["train/tokens_forest"])
    flops = 6 * (body * 1024 + model.params["embed"]["embedding"].size * 512)
    seconds = median_s(grads, 3)
    report(f"gradient, row of 1024, {nodes} used", seconds, nodes, flops, rate)
    naive = stats["train/tokens_naive"]
    print(f"the same calls one by one are {naive:.0f} tokens: {naive / seconds:.0f} tokens/s")


if __name__ == "__main__":
    main()
