"""Measure the CPU time of the engine's thread per decode step, for models with few and many layers.

    python benchmarks/host_cost.py [--layout gpu] [--layers 2 30] [--slots 64] [--tokens 100]

The programs are replaced by ones that take and return the same arrays and compute nothing. So what
is left is the host's work: dispatch, reads, and the Python of the engine. An accelerator's decode
step cannot be faster than this work. Weights and cache are laid out as for a GPU, or with `--layout
cpu` as for a CPU, which has an array for each weight. The shapes take turns, and each row is the
median over all rounds. The last line is the ratio of most to fewest layers, which should be at most
1.2.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from window.engine import Bench, Clock, Step, make_programs, median_ms, plain_steps


def empty_generate(params: Any, state: Any, table: Any, *_: Any, **settings: Any) -> Any:
    """Return the state and zeros as tokens, like `programs.generate`, without computing."""
    import jax
    import jax.numpy as jnp

    # Without the barrier, JAX would hand back the cache without passing it to the program.
    _, state, _ = jax.lax.optimization_barrier((params, state, table))
    rows = settings["rows"]
    tokens, logprobs = jnp.full((1, rows), 97, jnp.int32), jnp.full((3, rows), -1.0)
    return state, jnp.concatenate([tokens, jax.lax.bitcast_convert_type(logprobs, jnp.int32)])


def empty_prefill(params: Any, cache: Any, prompts: Any, **_: Any) -> Any:
    """Return the cache as it is, like `programs.prefill` without tokens."""
    import jax

    return jax.lax.optimization_barrier((params, cache, prompts))[1]


@contextmanager
def running(layers: int, slots: int, tokens: int, layout: str = "gpu") -> Iterator[Bench]:
    """Start an engine of a tiny model whose programs compute nothing."""
    from lightning_jax.engine.config import ServeConfig
    from lightning_jax.engine.device import programs
    from lightning_jax.engine.device import slots as slot_programs
    from lightning_jax.engine.engine import Engine
    from lightning_jax.testing.tiny import tiny_model

    model = tiny_model(num_layers=layers)
    max_len = -(-(tokens + 64) // 64) * 64
    serve = ServeConfig(slots=slots, max_len=max_len, prefill_buckets=(32,), prefix_cache_mib=0.0)
    with (
        mock.patch.object(programs, "generate", empty_generate),
        mock.patch.object(programs, "prefill", empty_prefill),
        mock.patch.object(slot_programs, "platform_of", lambda _: layout),
    ):
        engine_programs = make_programs(model, serve)
    clock = Clock()
    clock.wrap_methods(engine_programs, ("generate", "prefill"))
    engine = Engine(model, serve, programs=[engine_programs])
    engine.start(slots)
    try:
        with clock.reads():
            yield Bench(engine, engine_programs, clock, slots, tokens)
    finally:
        engine.close()


def measure(args: argparse.Namespace) -> dict[int, list[Step]]:
    """Return the decode steps without an admission, by number of layers."""
    steps: defaultdict[int, list[Step]] = defaultdict(list)
    for _ in range(args.rounds):
        for number in args.layers:
            with running(number, args.slots, args.tokens, args.layout) as bench:
                bench.warm_up()
                bench.decode(seed=1)
                steps[number] += plain_steps(bench.clock.calls)
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layout", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 30])
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1]))  # the package may not be installed
    steps = measure(args)
    print("| layers | steps | CPU ms of the engine's thread | wall ms in `generate` | in reads |")
    print("|---|---|---|---|---|")
    for number, of_number in steps.items():
        parts = ([s.cpu_s for s in of_number], [s.dispatch_s for s in of_number])
        waits = [s.wait_s for s in of_number]
        cells = [f"{median_ms(part):.2f}" for part in (*parts, waits)]
        print(f"| {number} | {len(of_number)} |", " | ".join(cells), "|")
    few, many = (
        median_ms(step.cpu_s for step in steps[number])
        for number in (min(args.layers), max(args.layers))
    )
    print(f"ratio of {max(args.layers)} to {min(args.layers)} layers: {many / few:.2f}, bar 1.2")


if __name__ == "__main__":
    main()
