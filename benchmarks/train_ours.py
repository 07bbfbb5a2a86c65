"""Our update of a train state, in this process. See updates.py for the command line."""

import argparse
import dataclasses
from collections.abc import Sequence

import jax
from speed import flops_per_s
from updates import LEARNING_RATE, MAX_GRAD_NORM, Call, Clock, Result, main

from lightning_jax.engine.config import ServeConfig
from lightning_jax.models.config import MeshConfig, ModelConfig
from lightning_jax.models.formats.load import load_model
from lightning_jax.rl.config import AlgorithmConfig, BatchConfig, OptimizerConfig
from lightning_jax.rl.sequence import TrainingSequence
from lightning_jax.train.config import Config
from lightning_jax.train.state.updaters import phase_updater

# Row sizes chosen for the known lengths of the calls.
BATCHES = {
    "a": BatchConfig(rows=1, row_len=512, max_targets=128, head_chunk=128),
    "b": BatchConfig(rows=1, row_len=1536, max_targets=640, head_chunk=128),
}


def batch_config(args: argparse.Namespace) -> BatchConfig:
    """Return the row sizes of the workload, with overrides from the command line."""
    full = BATCHES[args.workload]
    size = {"row_len": full.row_len // args.shrink} if args.shrink > 1 else {}
    sizes = {"rows": args.rows, "row_len": args.row_len}
    return dataclasses.replace(full, **size, **{k: v for k, v in sizes.items() if v})


def measure(args: argparse.Namespace, calls: Sequence[Call]) -> Result:
    precision = ModelConfig(
        dtype=args.dtype,
        activation_dtype=None if args.dtype == "float32" else "float32",
        remat=args.remat,
    )
    batch = batch_config(args)
    model = load_model(args.model, activation_dtype=precision.activation_dtype)
    config = Config(
        model=precision,
        # The old log-probs are the policy's own, so the ratio is 1.
        algorithm=AlgorithmConfig(proximal="old"),
        serve=ServeConfig(max_len=batch.row_len),
        batch=batch,
        optimizer=OptimizerConfig(learning_rate=LEARNING_RATE, max_grad_norm=MAX_GRAD_NORM),
        mesh=MeshConfig(fsdp=1),
    )
    learner = phase_updater(model.config, config, supervised=False)
    shapes = jax.tree.map(lambda leaf: leaf.size, model.params)
    embedding, total = shapes["embed"]["embedding"], sum(jax.tree.leaves(shapes))
    state = learner.init(model.params)
    del model
    num_targets = sum(len(call.response) for call in calls)
    sequences = [
        TrainingSequence(
            call.prompt,
            call.response,
            behavior_logprobs=(0.0,) * len(call.response),
            advantage=call.advantage,
            weight=1 / num_targets,
        )
        for call in calls
    ]
    clock, norms, metrics = Clock(), [], {}
    for _ in range(1 + args.steps):
        clock.start()
        state, metrics = learner.update(state, sequences, None)
        jax.block_until_ready(state)
        clock.stop()
        norms.append(metrics["train/grad_norm"])
    batch = config.batch
    computed = int(metrics["train/num_batches"]) * batch.rows * batch.row_len
    result = clock.result(grad_norm=norms[0], computed=computed)
    rate = flops_per_s(args.dtype)
    # Only used nodes count, so that padding does not raise the limit.
    nodes = metrics["train/tokens_forest"]
    flops = 6 * ((total - embedding) * nodes + embedding * num_targets)
    return dataclasses.replace(
        result,
        limit_s=flops / rate,
        gflops=rate / 1e9,
        naive_to_forest=metrics["train/tokens_naive"] / nodes,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights read"
    )
    parser.add_argument("--rows", type=int, help="of a microbatch")
    parser.add_argument("--row-len", type=int, help="nodes of a row")
    parser.add_argument("--remat", default="none", help="as model.remat: compute again, keep less")


if __name__ == "__main__":
    main(measure, ("jax", "jaxlib", "optax"), add_arguments)
