"""Measure a decode step, a prefill and a gradient against the products and reads that they need.

Each figure is the median of several runs. The limits are measured in the same process: the time
that large float32 (or bfloat16) matrix products take for the same number of floating-point
operations, and the time to read the weights once, a thread for each core. The ratio is to the
longer of the two.

    python benchmarks/speed.py [--model smollm2-135m-instruct] [--slots 16] [--context 256]
    python benchmarks/speed.py --model FILE.gguf --dtype bfloat16 --activation-dtype float32 \
        --lora-rank 32
"""

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.device.slots import Fill, SlotPrograms
from lightning_jax.engine.device.table import SlotTable
from lightning_jax.engine.types import SamplingParams
from lightning_jax.models.config import LoraConfig
from lightning_jax.models.formats.load import LoadedModel, load_model
from lightning_jax.models.lora import adapted, frozen_part, trained_part
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


def bytes_per_s() -> float:
    """Return the bytes/s at which all cores together read arrays of 256 MiB, each its own."""
    arrays = [np.ones(2**26, np.float32) for _ in range(os.cpu_count() or 1)]
    with ThreadPoolExecutor(len(arrays)) as pool:
        return sum(x.nbytes for x in arrays) / median_s(lambda: list(pool.map(np.max, arrays)), 7)


@dataclass(frozen=True)
class Limits:
    flops_per_s: float
    bytes_per_s: float

    def report(self, name: str, seconds: float, tokens: int, flops: float, weights: int) -> None:
        """Print one figure beside what its products and one read of `weights` bytes take."""
        times = {"products": flops / self.flops_per_s, "reads": weights / self.bytes_per_s}
        bound = max(times, key=lambda kind: times[kind])
        print(
            f"{name:32s} {1e3 * seconds:9.1f} ms {tokens / seconds:9.0f} tokens/s   "
            + "   ".join(f"{kind} {1e3 * value:8.1f} ms" for kind, value in times.items())
            + f"   ratio to {bound} {seconds / times[bound]:5.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--activation-dtype")
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--context", type=int, default=256)
    args = parser.parse_args()
    model = load_model(args.model, args.dtype, args.activation_dtype)
    model = adapted(model, LoraConfig(rank=args.lora_rank, alpha=args.lora_rank or 1))
    limits = Limits(flops_per_s(jnp.dtype(args.dtype)), bytes_per_s())
    print(
        f"{args.model} {args.dtype} on {jax.devices()[0].device_kind}: "
        f"{limits.flops_per_s / 1e9:.0f} GFLOP/s, {limits.bytes_per_s / 1e9:.0f} GB/s"
    )
    measure_serving(model, args.dtype, args.slots, args.context, limits)
    measure_gradient(model, args.dtype, args.context, limits)


def sizes_of(model: LoadedModel) -> tuple[int, int, int]:
    """Return the weights of the layers, those of the head, and the bytes of all."""
    leaves = jax.tree.leaves(model.params)
    head = model.params["embed"]["embedding"].size
    return sum(leaf.size for leaf in leaves) - head, head, sum(leaf.nbytes for leaf in leaves)


def measure_serving(
    model: LoadedModel, dtype: str, slots: int, context: int, limits: Limits
) -> None:
    body, head, weights = sizes_of(model)
    serve = ServeConfig(slots=slots, max_len=2 * context, prefill_buckets=(context,))
    engine = SlotPrograms(model.config, serve, dtype=dtype)
    params, fills = engine.put_on_mesh(model.params), [Fill(0, 0, prompt_of(context))]
    box = [engine.init_state()]

    def fill() -> Any:
        cache = engine.prefill(params, box[0].cache, fills)
        box[0] = replace(box[0], cache=cache)
        return cache

    seconds = median_s(fill, 5)
    limits.report(f"prefill of {context}", seconds, context, 2 * body * context, weights)
    table = SlotTable(slots)
    for slot in range(slots):
        table.begin(slot, 7, context - 64, SamplingParams(), slot)

    def step() -> Any:
        box[0], sampled = engine.generate(params, box[0], table, range(slots))
        return sampled

    seconds = median_s(step, 20)
    flops = 2 * (body + head) * slots
    limits.report(f"decode step of {slots} slots", seconds, slots, flops, weights)


def prompt_of(length: int) -> list[int]:
    return list(range(5, 5 + length))


def measure_gradient(model: LoadedModel, dtype: str, context: int, limits: Limits) -> None:
    """Measure sixteen responses of 32 tokens to one prompt, like a GRPO group."""
    ids = tuple(prompt_of(context))
    sequences = [
        TrainingSequence(ids, tuple(range(9 + k, 41 + k)), (-1.0,) * 32, 1.0, 1 / 512)
        for k in range(16)
    ]
    config = BatchConfig(rows=1, row_len=1024, max_targets=512, head_chunk=128)
    (batch,), stats = make_batches(sequences, config)
    objective = policy_objective(clip_low=0.2, clip_high=0.2)
    functions = make_train_functions(
        model.config.with_execution(scans_layers=jax.default_backend() == "cpu"),
        optax.identity(),
        objective,
        head_chunk=128,
        compute_dtype=jnp.dtype(dtype),
    )
    base = frozen_part(model.params)
    trained = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), trained_part(model.params))
    sums = [zero_accumulators(functions, trained)]

    def grads() -> Any:
        bundle, count = bundles([batch])[0]
        sums[0] = functions.grads_fn(trained, *sums[0], bundle, count, None, None, base)
        return sums[0][1]

    body, head, weights = sizes_of(model)
    nodes, naive = int(stats["train/tokens_forest"]), stats["train/tokens_naive"]
    # Forward and backward, a product each. Trained weights need one more for their own gradient.
    used, learned = body * 1024 + head * 512, sum(leaf.size for leaf in jax.tree.leaves(trained))
    flops = 4 * used + 2 * (used if base is None else learned * 1024)
    seconds = median_s(grads, 3)
    limits.report(f"gradient, row of 1024, {nodes} used", seconds, nodes, flops, weights)
    print(f"the same calls one by one are {naive:.0f} tokens: {naive / seconds:.0f} tokens/s")


if __name__ == "__main__":
    main()
