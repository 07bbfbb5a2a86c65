"""Cases of the update: gradients, what they recompute, attention, the optimizer, rounding, a trace.

The updater is the product's (rl/update/updater.py), with random weights and the sizes and algorithm
of experiments/configs/spider.yaml. Only the arguments of its compiled functions are made here.
"""

import dataclasses
import functools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from window import attention
from window.cases import Case, Figure, Setting, failed
from window.engine import attempt, trace_figures
from window.shapes import shape_of
from window.timing import median_s

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
    remat: Any = "attention"  # RematKind; as in experiments/configs/spider.yaml
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
    few_targets: str  # milliseconds with a quarter of the targets, for which the head runs


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

    def few_targets() -> Iterator[Figure]:
        few = dataclasses.replace(shape, targets=shape.targets // 4)
        update.load(few.sequences())
        what = ", a quarter of the targets"
        yield from _gradient_figures(update, repeats, what, (predicted.few_targets, predicted.mfu))

    yield from attempt("microbatch, a quarter of the targets", "ms", few_targets)

    def optimizer() -> Iterator[Figure]:
        seconds = median_s(update.apply, repeats)
        yield Figure("optimizer", 1e3 * seconds, "ms", predicted.optimizer, "clip and AdamW")
        yield peak_memory("peak memory with the optimizer", predicted.memory)

    yield from attempt("optimizer", "ms", optimizer)


def _update_case(shape: Shape, predicted: Predicted, setting: Setting) -> Iterator[Figure]:
    yield from attempt("microbatch", "ms", lambda: _measure_update(shape, predicted, setting))


# By what is recomputed: milliseconds and MFU in percent of 2 rows with tokamax and with Triton, and
# the memory in GB.
REMAT = {
    "full": ("233, 302", "35, 27", "29"),
    "attention": ("227, 290", "36, 28", "30"),
    "mlp": ("199, 262", "41, 31", "39"),
    "none": ("191, 252", "42, 32", "46"),
}


def _remat(setting: Setting) -> Iterator[Figure]:
    repeats = 5 if setting.is_tiny else 10
    for kind, (time_ms, share, memory) in REMAT.items():
        shape = Shape("1.5b", 2, remat=kind)
        if setting.is_tiny:
            shape = shape.tiny()

        def measure(shape: Shape = shape, predicted: tuple[str, ...] = REMAT[kind]) -> Any:
            time_ms, share, memory = predicted
            what, update = f", remat {shape.remat}", make_update(shape)
            yield from _gradient_figures(update, repeats, what, (time_ms, share))
            yield peak_memory(f"peak memory{what}", memory)

        yield from attempt(f"microbatch, remat {kind}", "ms", measure)


def _kernels(setting: Setting) -> Iterator[Figure]:
    """Measure the whole gradient with each attention kernel that is there."""
    from unittest import mock

    from lightning_jax.models.attention import attention as chosen
    from lightning_jax.models.attention import flash_gpu, flash_tokamax

    shape, repeats = Shape("1.5b", 4), 10
    if setting.is_tiny:
        shape, repeats = dataclasses.replace(shape.tiny(), rows=2, row_len=256), 5
    kernels = {"tokamax": (flash_tokamax, ("454", "36")), "Triton": (flash_gpu, ("581", "28"))}
    for name, (module, predicted) in kernels.items():

        def measure(name: str = name, module: Any = module, predicted: Any = predicted) -> Any:
            if module is flash_tokamax and not flash_tokamax.is_installed():
                yield failed(f"microbatch, {name}", "ms", "tokamax is not installed", predicted[0])
                return
            with mock.patch.object(chosen, "_for_gpu", lambda queries: module):
                yield from _gradient_figures(make_update(shape), repeats, f", {name}", predicted)

        yield from attempt(f"microbatch, {name}", "ms", measure)


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

        yield from trace_figures(setting, "microbatch", 2, twice, ("4500", "227000 to 290000"))

    yield from attempt("microbatch: kernels", "", measure)


def _case(name: str, minutes: float, measures: str, shape: Shape, predicted: Predicted) -> Case:
    return Case(name, minutes, measures, functools.partial(_update_case, shape, predicted))


# Times of 1.5B are computed (MFU is 161.5 s % over the time): trunk 286 ms, 229 if gate and up are
# kept and 214 if all is; attention 64, 53 if its results are kept, or 202 and 180 with Triton; the
# head 55 and all else 60. Two rows take half.
CASES = (
    _case(
        "update_1_5b_rows4",
        1.8,
        "gradient and optimizer of 1.5B, 4 rows of 4,096 nodes, attention's results kept",
        Shape("1.5b", 4),
        Predicted("454 (tokamax), 581 (Triton)", "36, 28", "34", "15", "41 less"),
    ),
    Case("kernels_1_5b", 1.2, "the same gradient with tokamax and with Triton", _kernels),
    Case("attention", 1.0, "attention of 4 rows of 4,096 nodes alone", attention.measure_rows),
    Case("differences", 0.4, "attention kernels against float32", attention.measure_differences),
    Case("remat_1_5b", 2.4, "gradient of 2 rows by what is recomputed, and its memory", _remat),
    _case(
        "update_0_5b_lora",
        0.9,
        "gradient and optimizer of adapters of rank 32 on 0.5B, 8 rows of 1,024 nodes",
        Shape("0.5b", 8, row_len=1024, targets=512, remat="none", rank=32),
        Predicted("60", "25", "20", "2", "5 less"),
    ),
    Case("rounding", 0.6, "error of a gradient against float32 on the CPU", _rounding),
    Case("traces", 1.0, "kernels of 2 microbatches", _traces),
)
