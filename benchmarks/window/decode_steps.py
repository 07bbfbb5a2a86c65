"""Decode steps to measure: the engine's own, several at once, with branches, separate weights."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from lightning_jax.engine import sampling
from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.device import programs
from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.engine.device.table import SlotTable
from lightning_jax.engine.sampling import Sampled
from lightning_jax.engine.types import SamplingParams
from lightning_jax.models.shape import DecoderConfig
from lightning_jax.models.transformer import Params, param_shapes, stack_layers
from window.shapes import shape_of

Options = Mapping[str, str]  # of XLA's compiler
Dispatch = Callable[[], Any]  # starts the next steps and returns their result on the device
AT_ONCE = 4  # steps of a dispatch of `chain`


def random_weights(shapes: Params, dtype: Any) -> Params:
    """Return random weights: kernels normal with standard deviation 0.02, norms 1, biases 0.

    One small program per shape, because one for all weights takes long to compile.
    """

    def leaf(path: Any, shape: Any) -> Any:
        name = jax.tree_util.keystr(path)
        if "norm" in name:
            return jnp.ones(shape.shape, dtype)
        if "bias" in name:
            return jnp.zeros(shape.shape, dtype)
        key = jax.random.key(next(seeds))
        return _normal(key, shape.shape, jnp.dtype(dtype))

    seeds = iter(range(10**6))
    return jax.tree_util.tree_map_with_path(leaf, shapes)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    return (0.02 * jax.random.normal(key, shape, dtype)).astype(dtype)


@dataclass(frozen=True)
class Workload:
    """Decode batch: all slots in use, each with about `used` tokens."""

    config: DecoderConfig
    slots: int
    max_len: int
    used: int
    repeats: int

    @property
    def first_position(self) -> int:
        """Position of the first step, so that single steps on average see `used` tokens."""
        return self.used - self.repeats - 4


def make_workload(model: str, slots: int, is_tiny: bool) -> Workload:
    """Return the workload of a model: 135m, 1.5b or 8b. If tiny, that of the tiny model."""
    if is_tiny:
        return Workload(shape_of("tiny"), slots=4, max_len=64, used=32, repeats=5)
    return Workload(shape_of(model), slots, max_len=768, used=640, repeats=30)


def engine_steps(
    load: Workload, options: Options | None = None, *, is_stacked: bool = True, steps: int = 1
) -> Dispatch:
    """Return the engine's own decode steps, compiled with these options, or with its own."""
    serve = ServeConfig(
        slots=load.slots,
        max_len=load.max_len,
        prefill_buckets=(load.max_len,),
        steps_per_dispatch=steps,
    )
    engine = SlotPrograms(load.config, serve, dtype="bfloat16")
    if options is not None:
        engine._jit = functools.partial(jax.jit, compiler_options=dict(options))
        engine._compile_later()
    shapes = param_shapes(load.config)
    if is_stacked:
        shapes = jax.eval_shape(stack_layers, shapes)
    weights = random_weights(shapes, "bfloat16")
    states, table, slots = [engine.init_state()], _full_table(load), range(load.slots)
    if steps > 1:  # otherwise single steps would serve until the program is compiled
        arguments = (engine._per_step(weights), states[0], table.next_steps(()))
        engine._generate_steps.compile((len(engine.capacities), load.slots), *arguments)

    def dispatch() -> Any:
        states[0], sampled = engine.generate(
            weights, states[0], table, slots, steps=steps, has_filters=False
        )
        return sampled

    return dispatch


def _full_table(load: Workload) -> SlotTable:
    table = SlotTable(load.slots)
    for slot in range(load.slots):
        table.begin(slot, 7 + slot, load.first_position, SamplingParams(), slot)
    return table


def branched_steps(load: Workload) -> Dispatch:
    """Return the engine's decode step with sampling that branches, as on a CPU."""
    dispatch = engine_steps(load)

    def sample_with_branches(*inputs: Any) -> Sampled:
        *others, _ = inputs  # the last one is the work of a program without branches
        return sampling.sample(*others)

    def dispatch_with_branches() -> Any:  # the first call traces the program
        with mock.patch.object(programs, "sample", sample_with_branches):
            return dispatch()

    first = [dispatch_with_branches]
    return lambda: first.pop()() if first else dispatch()


def separate_steps(load: Workload) -> Dispatch:
    """Return the engine's decode step with one array for each weight, as beside adapters."""
    return engine_steps(load, is_stacked=False)


def chain_steps(load: Workload) -> Dispatch:
    """Return several of the engine's decode steps in one dispatch."""
    return engine_steps(load, steps=AT_ONCE)


def bytes_per_step(load: Workload) -> float:
    """Return the bytes of weights and of used keys and values that a bfloat16 step must read."""
    config = load.config
    shapes = param_shapes(config)
    tied = config.shape.tie_embeddings
    read = shapes if tied else {k: v for k, v in shapes.items() if k != "embed"}
    weights = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(read))
    width = sum(block.mixer.kv_heads * block.mixer.head_dim for block in config.shape.blocks)
    return 2.0 * (weights + 2 * load.slots * load.used * width)


STEPS: dict[str, Callable[[Workload], Dispatch]] = {
    "generate": engine_steps,
    "branched": branched_steps,
    "separate": separate_steps,
    "chain": chain_steps,
}
