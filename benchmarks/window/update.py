"""Cases of the update: gradients of microbatches, the optimizer, attention, rounding and a trace.

The updater is the product's (rl/update/updater.py), with random weights and the sizes and algorithm
of experiments/configs/spider.yaml. Only the arguments of its compiled functions are made here.
"""

import dataclasses
import functools
import importlib
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from window.cases import Case, Figure, Setting, failed
from window.engine import attempt, trace_figures
from window.shapes import shape_of

# Microbatches.


def sequences_of(
    rows: int, row_len: int, targets: int, branches: int, vocab_size: int
) -> list[Any]:
    """Return sequences that fill `rows` rows of `row_len` nodes.

    Each row is one prompt with `branches` responses, which have about `targets` tokens together.
    """
    from lightning_jax.rl.sequence import TrainingSequence

    rng, sequences = random.Random(0), []
    logprob = -math.log(vocab_size)  # near that of random weights, so that no ratio is cut
    response = targets // branches
    # The model reads all tokens but a response's last one.
    prompt = row_len - branches * (response - 1)

    def ids(number: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab_size) for _ in range(number))

    for row in range(rows):
        first = (row, *ids(prompt - 1))
        for branch in range(branches):
            sequences.append(
                TrainingSequence(
                    first,
                    (branch, *ids(response - 1)),
                    behavior_logprobs=(logprob,) * response,
                    advantage=1.0 if branch % 2 else -1.0,
                    weight=1 / (rows * targets),
                )
            )
    return sequences


@dataclass
class Update:
    """State of an updater and one microbatch on the device."""

    config: Any
    updater: Any
    state: Any
    bundles: list[tuple[Any, Any]]
    work: Any  # its size (`rl/update/flops.py`)
    sums: Any = None  # accumulators of the gradient and of the metrics, donated by each call

    def gradient(self) -> None:
        """Add the gradients of the microbatches, and wait for them."""
        import jax

        from lightning_jax.rl.update.train_step import zero_accumulators

        functions, state = self.updater.functions, self.state
        if self.sums is None:
            self.sums = zero_accumulators(functions, state.params)
        for bundle, count in self.bundles:
            self.sums = functions.grads_fn(
                state.params, *self.sums, bundle, count, None, None, state.base
            )
        jax.block_until_ready(self.sums)

    def apply(self) -> None:
        """Apply the gradient to the weights, and wait for them."""
        import jax

        state = dataclasses.replace(self.state, base=None)
        new, _ = self.updater.functions.apply_fn(state, self.sums[0])
        self.state = jax.block_until_ready(dataclasses.replace(new, base=self.state.base))

    def load(self, sequences: Sequence[Any]) -> None:
        """Replace the microbatches by those of other sequences."""
        self.bundles, self.work = _place(self.updater, sequences)


def _place(updater: Any, sequences: Sequence[Any]) -> tuple[list[tuple[Any, Any]], Any]:
    from lightning_jax.rl.batches.batching import make_batches
    from lightning_jax.rl.batches.microbatches import bundles, place_batches
    from lightning_jax.rl.update.flops import work_of

    batches, _ = make_batches(sequences, updater.batch)
    on_device = place_batches(batches, updater.batch, updater.mesh)
    return bundles(on_device), work_of(batches)


@dataclass(frozen=True)
class Shape:
    """Model and sizes of a microbatch."""

    model: str
    rows: int
    row_len: int = 4096
    targets: int = 2048
    head_chunk: int = 256
    remat: Any = "full"  # RematKind
    rank: int = 0  # of adapters; 0: all weights are trained

    def tiny(self) -> "Shape":
        """Return sizes for a rehearsal, with as many rows."""
        small = {"model": "tiny", "row_len": 64, "targets": 32, "head_chunk": 16}
        return dataclasses.replace(self, **small, rank=min(self.rank, 4))

    def sequences(self, branches: int = 1, microbatches: int = 1) -> list[Any]:
        vocab_size = shape_of(self.model).shape.vocab_size
        rows = self.rows * microbatches
        return sequences_of(rows, self.row_len, self.targets, branches, vocab_size)


def make_update(shape: Shape, *, dtype: str = "bfloat16", device: Any = None) -> Update:
    """Return the product's updater for a random model on one device, with a microbatch."""
    import jax
    import jax.numpy as jnp

    from lightning_jax.models.config import LoraConfig, MeshConfig
    from lightning_jax.models.lora import adapted_shape
    from lightning_jax.models.mesh import make_mesh
    from lightning_jax.models.transformer import init_params
    from lightning_jax.rl.config import AlgorithmConfig, BatchConfig, OptimizerConfig
    from lightning_jax.rl.update.updater import make_updater

    config = adapted_shape(shape_of(shape.model), LoraConfig(rank=shape.rank))
    updater = make_updater(
        config,
        AlgorithmConfig(clip_high=0.28, proximal="old", correction="truncate", correction_high=2.0),
        OptimizerConfig(learning_rate=1e-6, warmup_steps=10),
        BatchConfig(shape.rows, shape.row_len, shape.targets, shape.head_chunk),
        mesh=make_mesh(MeshConfig(fsdp=1), [device or jax.devices()[0]]),
        dtype=dtype,
        remat=shape.remat,
    )
    # Trained weights are float32. Frozen ones are in the dtype that they were loaded in.
    weights = jnp.dtype(dtype if shape.rank else "float32")
    with jax.default_device(device):
        state = updater.init(init_params(config, jax.random.key(0), weights))
    return Update(config, updater, state, *_place(updater, shape.sequences()))


# Measurements.


def median_s(run: Callable[[], Any], repeats: int) -> float:
    """Return the median seconds of `run`, which waits for its results, after one run to compile."""
    run()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def peak_memory(name: str, predicted: str) -> Figure:
    """Return the process's peak memory on the first device."""
    import jax

    stats = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" not in stats:
        return failed(name, "GB", "this device does not count memory")
    return Figure(name, stats["peak_bytes_in_use"] / 1e9, "GB", predicted, "since the start")


def _gradient_figures(
    update: Update, repeats: int, what: str, predicted: tuple[str, str]
) -> Iterator[Figure]:
    """Yield time and MFU of the loaded microbatch. `predicted` has both."""
    import jax

    from lightning_jax.rl.update.flops import gradient_flops
    from lightning_jax.system.accelerators import find_accelerator

    seconds, work = median_s(update.gradient, repeats), update.work
    note = f"{work.tokens} nodes, {work.targets} targets, median of {repeats}"
    yield Figure(f"microbatch{what}", 1e3 * seconds, "ms", predicted[0], note)
    yield Figure(f"nodes per second{what}", work.tokens / seconds, "tokens/s", "")
    accelerator = find_accelerator(jax.devices()[0].device_kind)
    if accelerator is None:
        yield failed(f"MFU{what}", "%", "no peak rate for this device")
        return
    share = 100 * gradient_flops(update.config, work) / seconds / accelerator.flops
    note = f"of {accelerator.flops / 1e12:g} TFLOP/s"
    yield Figure(f"MFU{what}", share, "%", predicted[1], note)


@dataclass(frozen=True)
class Predicted:
    """Predictions for one shape."""

    microbatch: str
    mfu: str
    memory: str
    optimizer: str


def _measure_update(shape: Shape, predicted: Predicted, setting: Setting) -> Iterator[Figure]:
    if setting.is_tiny:
        shape = shape.tiny()
    repeats = 5 if setting.is_tiny else 30 if shape.rank else 10
    update = make_update(shape)
    yield from _gradient_figures(update, repeats, "", (predicted.microbatch, predicted.mfu))
    yield peak_memory("peak memory of the gradient", predicted.memory)

    def branched() -> Iterator[Figure]:
        update.load(shape.sequences(branches=8))
        expected = f"below {predicted.microbatch}", predicted.mfu
        yield from _gradient_figures(update, repeats, ", 8 branches a row", expected)

    yield from attempt("microbatch, 8 branches a row", "ms", branched)

    def optimizer() -> Iterator[Figure]:
        seconds = median_s(update.apply, repeats)
        yield Figure("optimizer", 1e3 * seconds, "ms", predicted.optimizer, "clip and AdamW")
        yield peak_memory("peak memory with the optimizer", predicted.memory)

    yield from attempt("optimizer", "ms", optimizer)


def _update_case(shape: Shape, predicted: Predicted, setting: Setting) -> Iterator[Figure]:
    yield from attempt("microbatch", "ms", lambda: _measure_update(shape, predicted, setting))


def _without_remat(setting: Setting) -> Iterator[Figure]:
    repeats = 5 if setting.is_tiny else 10
    for rows, time_ms, memory in ((1, "125", "46"), (2, "250", "57")):
        shape = Shape("1.5b", rows, remat="none")
        if setting.is_tiny:
            shape = shape.tiny()

        def measure(shape: Shape = shape, time_ms: str = time_ms, memory: str = memory) -> Any:
            update = make_update(shape)
            what = f", rows={shape.rows} without remat"
            yield from _gradient_figures(update, repeats, what, (time_ms, "32"))
            yield peak_memory(f"peak memory, rows={shape.rows} without remat", memory)

        yield from attempt(f"microbatch, rows={rows} without remat", "ms", measure)


# Attention alone.


def _attention_inputs(shape: Shape, heads: tuple[int, int, int], branches: int) -> Any:
    """Return (queries, keys, values, ends, pairs) of rows with a tree mask."""
    import jax
    import jax.numpy as jnp

    from lightning_jax.rl.batches.batching import make_batches
    from lightning_jax.rl.config import BatchConfig
    from lightning_jax.rl.update.flops import work_of

    sizes = BatchConfig(shape.rows, shape.row_len, shape.targets, shape.head_chunk)
    (batch,), _ = make_batches(shape.sequences(branches), sizes)
    num_heads, num_kv_heads, size = heads
    keys = jax.random.split(jax.random.key(0), 3)
    rows = shape.rows, shape.row_len
    arrays = [
        jax.random.normal(key, (*rows, number, size), jnp.bfloat16)
        for key, number in zip(keys, (num_heads, num_kv_heads, num_kv_heads), strict=True)
    ]
    return *arrays, jnp.asarray(batch.ends), work_of([batch]).pairs


def _time_attention(
    name: str, attend: Any, inputs: Any, repeats: int, predicted: tuple[str, str]
) -> Iterator[Figure]:
    """Yield TFLOP/s of visible pairs, forward and with the backward pass."""
    import jax
    import jax.numpy as jnp

    *arrays, ends, pairs = inputs
    width = arrays[0].shape[2] * arrays[0].shape[3]
    forward = jax.jit(attend)

    def loss(queries: Any, keys: Any, values: Any, ends: Any) -> Any:
        return attend(queries, keys, values, ends).astype(jnp.float32).sum()

    backward = jax.jit(jax.grad(loss, (0, 1, 2)))
    programs = (("forward", forward, 4), ("forward and backward", backward, 12))
    for (what, program, flops), expected in zip(programs, predicted, strict=True):

        def run(program: Any = program) -> None:
            jax.block_until_ready(program(*arrays, ends))

        seconds = median_s(run, repeats)
        rate = flops * pairs * width / seconds / 1e12
        note = f"{1e3 * seconds:.3f} ms"
        yield Figure(f"{name}, {what}", rate, "TFLOP/s", expected, note)


def tokamax_attention() -> Callable[..., Any]:
    """Return tokamax's Hopper kernel with a tree mask. Raises ImportError without tokamax."""
    base = importlib.import_module("tokamax._src.ops.attention.base")
    mosaic = importlib.import_module("tokamax._src.ops.attention.pallas_mosaic_gpu")
    kernel = mosaic.PallasMosaicGpuFlashAttention()

    def attend(queries: Any, keys: Any, values: Any, ends: Any) -> Any:
        mask = base.Mask(is_causal=True, q_end=ends[:, None, :])
        return kernel(queries, keys, values, mask=mask)

    return attend


def _attention(setting: Setting) -> Iterator[Figure]:
    import jax
    import jax.numpy as jnp

    from lightning_jax.models.attention.attention import attend_tree

    shape, heads, repeats = Shape("1.5b", 4), (12, 2, 128), 30
    if setting.is_tiny:  # long enough for attention by blocks
        shape, heads, repeats = dataclasses.replace(shape.tiny(), rows=2, row_len=256), (4, 2, 8), 5
    for mask, branches in (("tree", 8), ("causal", 1)):
        inputs = _attention_inputs(shape, heads, branches)
        ours = functools.partial(
            _time_attention, f"project, {mask}", attend_tree, inputs, repeats, ("250", "150")
        )
        yield from attempt(f"project, {mask}", "TFLOP/s", ours)

        def theirs(mask: str = mask, inputs: Any = inputs) -> Iterator[Figure]:
            attend, arrays = tokamax_attention(), inputs[:4]
            name, rates = f"tokamax, {mask}", ("500", "380")
            yield from _time_attention(name, attend, inputs, repeats, rates)
            ours_out, theirs_out = (
                jax.jit(f)(*arrays).astype(jnp.float32) for f in (attend_tree, attend)
            )
            value = float(jnp.abs(ours_out - theirs_out).max())
            yield Figure(f"difference of tokamax, {mask}", value, "", "below 0.02", "largest")

        yield from attempt(f"tokamax, {mask}", "TFLOP/s", theirs)


# Rounding.


def relative_error(actual: Any, expected: Any) -> float:
    """Return the norm of the difference of two trees of arrays over the norm of the second."""
    import jax
    import numpy as np

    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    error = total = 0.0
    for left, right in pairs:
        right = np.asarray(right, np.float64)
        error += float(((np.asarray(left, np.float64) - right) ** 2).sum())
        total += float((right**2).sum())
    return math.sqrt(error / total)


def _rounding(setting: Setting) -> Iterator[Figure]:
    import jax

    shape = Shape("135m", 1, row_len=512, targets=256, head_chunk=128, remat="none")
    if setting.is_tiny:
        shape = shape.tiny()
    try:
        cpu = jax.devices("cpu")[0]
    except RuntimeError as error:
        yield failed("relative error", "", error)
        return

    def gradient(dtype: str, device: Any) -> Any:
        update = make_update(shape, dtype=dtype, device=device)
        # Random bits are the same on all devices, but normals are not to the last bit.
        update.state = dataclasses.replace(
            update.state, params=jax.device_put(weights, update.state.step.sharding)
        )
        update.gradient()
        return jax.device_get(update.sums[0][0])

    weights = jax.device_get(make_update(shape, dtype="float32", device=cpu).state.params)
    with jax.default_matmul_precision("highest"):
        expected = gradient("float32", cpu)
    for dtype, predicted in (("bfloat16", "0.01 to 0.03"), ("float32", "below 0.002")):
        name = f"relative error of the gradient, {dtype}"

        def measure(name: str = name, dtype: str = dtype, predicted: str = predicted) -> Any:
            value = relative_error(gradient(dtype, jax.devices()[0]), expected)
            note = "against float32 on the CPU at highest precision"
            yield Figure(name, value, "", predicted, note)

        yield from attempt(name, "", measure)


def _traces(setting: Setting) -> Iterator[Figure]:
    shape = Shape("1.5b", 2)
    if setting.is_tiny:
        shape = shape.tiny()

    def measure() -> Iterator[Figure]:
        update = make_update(shape)
        update.gradient()

        def twice() -> None:
            update.gradient()
            update.gradient()

        yield from trace_figures(setting, "microbatch", 2, twice, ("4500", "310000"))

    yield from attempt("microbatch: kernels", "", measure)


def _case(name: str, minutes: float, measures: str, shape: Shape, predicted: Predicted) -> Case:
    return Case(name, minutes, measures, functools.partial(_update_case, shape, predicted))


CASES = (
    _case(
        "update_1_5b_rows4",
        2.0,
        "gradient and optimizer of 1.5B, 4 rows of 4,096 nodes, with remat",
        Shape("1.5b", 4),
        Predicted("621", "26", "40", "15"),
    ),
    _case(
        "update_1_5b_rows2",
        2.0,
        "the same with 2 rows",
        Shape("1.5b", 2),
        Predicted("315", "26", "35", "15"),
    ),
    Case("update_1_5b_no_remat", 2.5, "the same with 1 and 2 rows, without remat", _without_remat),
    _case(
        "update_0_5b_lora",
        1.5,
        "gradient and optimizer of adapters of rank 32 on 0.5B, 8 rows of 1,024 nodes",
        Shape("0.5b", 8, row_len=1024, targets=512, remat="none", rank=32),
        Predicted("60", "25", "20", "2"),
    ),
    Case("attention", 1.0, "attention of 4 rows of 4,096 nodes, ours and tokamax's", _attention),
    Case("rounding", 1.0, "error of a gradient against float32 on the CPU", _rounding),
    Case("traces", 1.5, "kernels of 2 microbatches", _traces),
)
