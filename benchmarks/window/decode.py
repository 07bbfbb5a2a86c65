"""Measurements of decode steps on a GPU, most valuable first.

Each case runs in a process of its own. Weights are random, so no files are needed. As a program,
this module measures one decode step and prints its times as JSON:

    python -m window.decode generate 135m 64 [--tiny]
"""

import argparse
import functools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from window import attention
from window.cases import Case, Figure, Setting, failed
from window.timing import seconds_a_run

BEGIN, END = "window: steps begin", "window: steps end"  # around the measured steps, on stderr
NO_BUFFERS = {
    "xla_gpu_enable_command_buffer": "",
    "xla_gpu_graph_min_graph_size": "1000000",
}
# The defaults of JAX 0.11.2 with WHILE.
WITH_WHILE = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,"
    "DYNAMIC_SLICE_FUSION,WHILE",
    "xla_gpu_graph_min_graph_size": "1",
}
# A program's own option is too late: the allocator that this mode needs is chosen at the start.
SKIP_TEMP = "--xla_gpu_command_buffer_update_mode=SKIP_TEMP"
NEEDS_GPU = "skipped: needs a GPU"
Options = Mapping[str, str]
Dispatch = Callable[[], Any]  # starts the next step and returns its result on the device
VARIANTS = ("generate", "branched", "separate", "chain")  # of decode_steps.STEPS


@dataclass(frozen=True)
class StepTimes:
    """Median milliseconds of a decode step."""

    waited: float  # read before the next is dispatched
    ahead: float  # read after the next is dispatched, as the engine does
    dispatch: float  # of `ahead`, until the dispatch returns


def measure_steps(dispatch: Dispatch, repeats: int, at_once: int = 1) -> StepTimes:
    """Return the times of a decode step that is compiled. Dispatches `2 * repeats + 4` times.

    Each dispatch makes `at_once` steps.
    """
    import jax

    for _ in range(3):
        jax.device_get(dispatch())
    waited, ahead, dispatching = [], [], []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.device_get(dispatch())
        waited.append(time.perf_counter() - started)
    due = dispatch()
    for _ in range(repeats):
        started = time.perf_counter()
        following = dispatch()
        dispatching.append(time.perf_counter() - started)
        jax.device_get(due)
        ahead.append(time.perf_counter() - started)
        due = following
    jax.device_get(due)
    parts = (waited, ahead, dispatching)
    return StepTimes(*(1e3 * statistics.median(part) / at_once for part in parts))


@dataclass(frozen=True)
class Predicted:
    """Predicted milliseconds of a step, and its share of the memory bound in percent."""

    waited: str
    ahead: str
    dispatch: str
    share: str = ""


# By variant, model and slots. Two ends of a range are an H200 and an H100 where they differ.
PREDICTED = {
    ("branched", "135m", 64): Predicted("1.6 to 2.1", "1.6 to 2.1", "1.6 to 2.1, or 0.45 to 0.6"),
    ("generate", "135m", 64): Predicted("1.2 to 1.6", "1.1 to 1.5", "0.06", "27 to 36"),
    ("separate", "135m", 64): Predicted("1.6 to 2.1", "1.1 to 1.5", "0.45 to 0.6", "27 to 36"),
    ("chain", "135m", 64): Predicted("1.1 to 1.5", "1.1 to 1.5", "0.03", "27 to 36"),
    ("branched", "1.5b", 64): Predicted("2.2 to 2.8", "2.2 to 2.8", "2.2 to 2.8, or 0.45 to 0.6"),
    ("generate", "1.5b", 64): Predicted("1.8 to 2.3", "1.7 to 2.2", "0.06", "58 to 65"),
    ("separate", "1.5b", 64): Predicted("2.2 to 2.8", "1.7 to 2.2", "0.45 to 0.6", "58 to 65"),
    ("chain", "1.5b", 64): Predicted("1.7 to 2.2", "1.7 to 2.2", "0.03", "58 to 65"),
    ("branched", "8b", 64): Predicted("7.1 to 9.7", "7.1 to 9.7", "7.1 to 9.7, or 0.5 to 0.7"),
    ("generate", "8b", 64): Predicted("6.7 to 9.2", "6.6 to 9.1", "0.06", "75 to 78"),
    ("separate", "8b", 64): Predicted("7.1 to 9.7", "6.6 to 9.1", "0.5 to 0.7", "75 to 78"),
    ("branched", "135m", 128): Predicted("1.6 to 2.3", "1.6 to 2.3", "1.6 to 2.3, or 0.45 to 0.6"),
    ("generate", "135m", 128): Predicted("1.2 to 1.8", "1.1 to 1.7", "0.06", "43 to 51"),
    ("separate", "135m", 128): Predicted("1.6 to 2.3", "1.1 to 1.7", "0.45 to 0.6", "43 to 51"),
}


def steps_at_once(variant: str) -> int:
    """Return the steps of one dispatch."""
    from window.decode_steps import AT_ONCE

    return AT_ONCE if variant == "chain" else 1


def _measure_decode(variant: str, model: str, slots: int, setting: Setting) -> Iterator[Figure]:
    import jax

    from window.decode_steps import STEPS, bytes_per_step, make_workload

    predicted, at_once = PREDICTED[variant, model, slots], steps_at_once(variant)
    load = make_workload(model, slots, setting.is_tiny)
    rate = _copy_gb_per_s(setting.is_tiny)
    started = time.perf_counter()
    dispatch = STEPS[variant](load)
    jax.device_get(dispatch())
    yield Figure("setup and first step", time.perf_counter() - started, "s")
    times = measure_steps(dispatch, load.repeats // at_once, at_once)
    yield from _step_figures("", times, predicted)
    size = bytes_per_step(load)
    bound = 1e3 * size / (1e9 * rate)
    note = f"{bound:.3f} ms for {size / 1e9:.3f} GB at {rate:.0f} GB/s"
    share = 100 * bound / times.ahead
    yield Figure("share of memory bound, one step ahead", share, "%", predicted.share, note)


def _step_figures(
    prefix: str, times: StepTimes, predicted: Predicted | None = None
) -> Iterator[Figure]:
    predicted = predicted or Predicted("", "", "")
    yield Figure(f"{prefix}waited for", times.waited, "ms a step", predicted.waited)
    yield Figure(f"{prefix}one step ahead", times.ahead, "ms a step", predicted.ahead)
    yield Figure(f"{prefix}dispatch", times.dispatch, "ms a step", predicted.dispatch)


def _measure_flags(setting: Setting) -> Iterator[Figure]:
    import jax

    from window.decode_steps import engine_steps, make_workload

    load = make_workload("135m", 64, setting.is_tiny)
    for name, options in {"no command buffers": NO_BUFFERS, "with WHILE": WITH_WHILE}.items():
        if options is WITH_WHILE and jax.default_backend() != "gpu":
            yield Figure(name, math.nan, "ms a step", note=NEEDS_GPU)
            continue
        try:
            dispatch = engine_steps(load, options)
            jax.device_get(dispatch())
            times = measure_steps(dispatch, load.repeats)
        except Exception as error:  # noqa: BLE001  (the compiler may not know an option)
            yield failed(name, "ms a step", error)
        else:
            yield from _step_figures(f"{name}: ", times)


def _run_child(
    variant: str, is_tiny: bool, seconds: float, **environment: str
) -> tuple[dict[str, Any], str]:
    """Return the result and the stderr of this module run as a program in a child process.

    Raises RuntimeError with an error from its log if it fails, TimeoutExpired after `seconds`.
    """
    folder = Path(__file__).resolve().parents[1]
    paths = [str(folder), str(folder.parent), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "window.decode", variant, "135m", "64"]
    done = subprocess.run(
        command + ["--tiny"] * is_tiny,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | environment,
        cwd=folder.parent,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=max(seconds, 1),
        check=False,
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        causes = [line for line in lines if re.search("Unknown flag|Check failed|Error", line)]
        reason = (causes or lines or [""])[-1]
        raise RuntimeError(f"the child process ended with {done.returncode}: {reason}")
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def _measure_skip_temp(setting: Setting) -> Iterator[Figure]:
    ends = time.monotonic() + setting.seconds - 5  # a child must not outlive this process
    flags = f"{os.environ.get('XLA_FLAGS', '')} {SKIP_TEMP}".strip()
    for variant in ("generate", "separate"):
        try:
            left = ends - time.monotonic()
            result, _ = _run_child(variant, setting.is_tiny, left, XLA_FLAGS=flags)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            yield failed(variant, "ms a step", error)
        else:
            yield from _step_figures(f"{variant}: ", StepTimes(**result["times"]))


UPDATE = re.compile(r"updated command buffer in ([\d.e+-]+) ?(\S*)", re.IGNORECASE)


def update_times_us(log: str) -> list[float]:
    """Return the times of the command buffer updates that a log reports, in microseconds."""
    scales = {"sec": 1e6, "s": 1e6, "ms": 1e3, "ns": 1e-3}
    updates = UPDATE.findall(log)
    return [float(value) * scales.get(unit.rstrip(";.,"), 1.0) for value, unit in updates]


def _measure_graph_updates(setting: Setting) -> Iterator[Figure]:
    ends = time.monotonic() + setting.seconds - 5  # a child must not outlive this process
    logging = {"TF_CPP_VMODULE": "command_buffer_thunk=3", "TF_CPP_MIN_LOG_LEVEL": "0"}
    for variant in VARIANTS:
        name = f"{variant}: graph updates"
        try:
            left = ends - time.monotonic()
            result, log = _run_child(variant, setting.is_tiny, left, **logging)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            yield failed(name, "a step", error)
            continue
        if result["platform"] != "gpu":
            yield Figure(name, math.nan, "a step", note=NEEDS_GPU)
            return
        measured = log.partition(BEGIN)[2].partition(END)[0]
        kept = [line for line in measured.splitlines() if "ommand buffer" in line]
        (setting.out / f"graph_updates_{variant}.txt").write_text("\n".join(kept[:400]) + "\n")
        times, steps = update_times_us(measured), result["steps"]
        note = f"{len(times)} in {steps} steps; {len(kept)} lines about command buffers"
        yield Figure(name, len(times) / steps, "a step", "0 to 2", note)
        yield Figure(f"{variant}: time of graph updates", sum(times) / steps, "us a step")


def _copy_gb_per_s(is_tiny: bool) -> float:
    """Return the rate of reading and writing one large array, both counted."""
    import jax
    import jax.numpy as jnp

    source = jnp.ones(2**18 if is_tiny else 2**28, jnp.float32)
    negate = jax.jit(lambda x: -x)
    seconds = seconds_a_run(lambda: negate(source), 5 if is_tiny else 10, at_once=4)
    return 2 * source.nbytes / seconds / 1e9


def _chain_us(options: Options | None, length: int, repeats: int) -> tuple[float, int]:
    """Return the microseconds per kernel of a chain of small kernels, and their number."""
    import jax
    import jax.numpy as jnp

    def chain(x: Any) -> Any:
        for i in range(length):  # sums over alternate axes keep the kernels apart
            x = jax.lax.optimization_barrier(x - x.mean(axis=i % 2, keepdims=True))
        return x

    x = jnp.ones((64, 64), jnp.float32)
    compiler_options = None if options is None else dict(options)
    compiled = jax.jit(chain, compiler_options=compiler_options).lower(x).compile()
    kernels = max(1, (compiled.as_text() or "").count(" fusion("))
    return 1e6 * seconds_a_run(lambda: compiled(x), repeats) / kernels, kernels


def _dispatch_us(leaves: int, repeats: int) -> float:
    import jax
    import jax.numpy as jnp

    arrays = [jnp.full((8,), i, jnp.float32) for i in range(leaves)]
    compiled = jax.jit(lambda leaves: leaves[0] + 1, keep_unused=True).lower(arrays).compile()
    times = []
    for _ in range(repeats + 3):
        started = time.perf_counter()
        result = compiled(arrays)
        times.append(time.perf_counter() - started)
        jax.block_until_ready(result)
    return 1e6 * statistics.median(times[3:])


def _read_us(repeats: int) -> float:
    import jax
    import jax.numpy as jnp
    import numpy as np

    add, times = jax.jit(lambda x: x + 1), []
    x = jnp.zeros(64, jnp.int32)
    for _ in range(repeats + 3):
        x = jax.block_until_ready(add(x))
        started = time.perf_counter()
        np.asarray(x)
        times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times[3:])


def _measure_ceilings(setting: Setting) -> Iterator[Figure]:
    import jax
    import jax.numpy as jnp

    repeats = 5 if setting.is_tiny else 30
    rate = _copy_gb_per_s(setting.is_tiny)
    yield Figure("copy, read and written", rate, "GB/s", "3000 (H100), 4300 (H200)")
    side = 256 if setting.is_tiny else 8192
    matrix = 0.02 * jax.random.normal(jax.random.key(0), (side, side), jnp.bfloat16)
    product = jax.jit(jnp.dot)
    seconds = seconds_a_run(lambda: product(matrix, matrix), repeats)
    yield Figure(f"bfloat16 product of {side}", 2 * side**3 / seconds / 1e12, "TFLOP/s", "790")
    length = 20 if setting.is_tiny else 200  # two kernels each
    chains = {"command buffers": (None, "1 to 1.5"), "no command buffers": (NO_BUFFERS, "2 to 4")}
    for how, (options, predicted) in chains.items():
        name = f"small kernel in a chain, {how}"
        try:
            time_us, kernels = _chain_us(options, length, repeats)
        except Exception as error:  # noqa: BLE001  (the compiler may not know an option)
            yield failed(name, "us", error, predicted)
        else:
            yield Figure(name, time_us, "us", predicted, f"{kernels} kernels")
    yield Figure("read of 64 numbers that are ready", _read_us(repeats), "us", "10 to 20")
    for leaves, predicted in ((342, "450 to 600"), (12, "50 to 60")):
        value = _dispatch_us(leaves, repeats)
        yield Figure(f"dispatch with {leaves} arrays", value, "us", predicted)


def _host_arrays_us(number_in: int, number_out: int, repeats: int) -> float:
    """Return the microseconds of a step that computes nothing, with settings from the host."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    settings = [np.zeros((64, 12 // number_in), np.int32) for _ in range(number_in)]

    @jax.jit
    def step(arrays: Any) -> Any:
        first = sum(array[:, 0] for array in arrays)
        return [jnp.tile(first, (4 // number_out, 1)) for _ in range(number_out)]

    times = []
    for _ in range(repeats + 3):
        started = time.perf_counter()
        jax.device_get(step(settings))
        times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times[3:])


def _measure_host_arrays(setting: Setting) -> Iterator[Figure]:
    repeats = 5 if setting.is_tiny else 100
    for number_in, number_out, predicted in ((1, 1, "80 to 120"), (12, 4, "250 to 500")):
        value = _host_arrays_us(number_in, number_out, repeats)
        name = f"arrays of the host: {number_in} in, {number_out} out"
        yield Figure(name, value, "us", predicted, "an empty step, until its result is read")


def _measure_pages(setting: Setting) -> Iterator[Figure]:
    import jax

    from lightning_jax.engine.config import ServeConfig
    from lightning_jax.engine.device.pages import PAGE, Move
    from lightning_jax.engine.device.slots import SlotPrograms
    from window.shapes import shape_of

    config = shape_of("tiny" if setting.is_tiny else "135m")
    serve = ServeConfig(slots=16, max_len=768, prefill_buckets=(768,), prefix_cache_mib=64.0)
    engine = SlotPrograms(config, serve, dtype="bfloat16")
    cache, pool = engine.init_state().cache, engine.pages.init_pool()
    mixers = [block.mixer for block in config.shape.blocks]
    page_bytes = 4 * PAGE * sum(mixer.kv_heads * mixer.head_dim for mixer in mixers)
    for rows, blocks, predicted in (
        (1, 2, "80 to 150"),
        (16, 4, "90 to 160"),
        (1, 40, "90 to 160"),
    ):
        moves = [
            Move(row * blocks + block, row, block) for row in range(rows) for block in range(blocks)
        ]
        times: dict[str, list[float]] = {"restore": [], "store": []}
        for _ in range(5 if setting.is_tiny else 33):
            started = time.perf_counter()
            cache = jax.block_until_ready(engine.pages.restore(cache, pool, moves))
            times["restore"].append(time.perf_counter() - started)
            started = time.perf_counter()
            pool = jax.block_until_ready(engine.pages.store(pool, cache, moves))
            times["store"].append(time.perf_counter() - started)
        note = f"{len(moves) * page_bytes / 1e6:.2f} MB, waited for"
        for name, values in times.items():
            value = 1e6 * statistics.median(values[3:])
            yield Figure(f"{name}, {rows} x {blocks} pages", value, "us", predicted, note)


def _decode_cases(model: str, slots: int, minutes: float) -> Iterable[Case]:
    for variant in VARIANTS:
        if (variant, model, slots) not in PREDICTED:
            continue
        measures = f"a decode step of {model}, {slots} slots x 640 tokens: {variant}"
        run = functools.partial(_measure_decode, variant, model, slots)
        yield Case(f"{variant}_{model}_{slots}", minutes, measures, run)


CASES: tuple[Case, ...] = (
    Case("ceilings", 0.5, "rates and latencies that no program exceeds", _measure_ceilings),
    *_decode_cases("135m", 64, 0.5),
    *_decode_cases("1.5b", 64, 0.5),
    Case("attention", 1.2, "decode attention alone, by seven kernels", attention.measure_decode),
    Case("host_arrays", 0.2, "a step's settings as one array and as many", _measure_host_arrays),
    Case("pages_135m", 0.3, "copies between rows and the prefix cache", _measure_pages),
    *_decode_cases("8b", 64, 0.7),
    Case("flags_135m_64", 0.8, "the engine's step with other compiler options", _measure_flags),
    Case("graph_updates", 1.2, "updates of command buffers in a step", _measure_graph_updates),
    Case("skip_temp_135m_64", 0.8, "steps whose graphs keep their addresses", _measure_skip_temp),
    *_decode_cases("135m", 128, 0.4),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("variant", choices=VARIANTS)
    parser.add_argument("model", choices=("135m", "1.5b", "8b"))
    parser.add_argument("slots", type=int)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    import jax

    from window.decode_steps import STEPS, make_workload

    load = make_workload(args.model, args.slots, args.tiny)
    dispatch = STEPS[args.variant](load)
    jax.device_get(dispatch())
    print(BEGIN, file=sys.stderr, flush=True)
    at_once = steps_at_once(args.variant)
    repeats = load.repeats // at_once
    times = measure_steps(dispatch, repeats, at_once)
    print(END, file=sys.stderr, flush=True)
    steps = at_once * (2 * repeats + 4)
    print(json.dumps({"times": asdict(times), "steps": steps, "platform": jax.default_backend()}))


if __name__ == "__main__":
    main()
