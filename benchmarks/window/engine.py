"""Cases of the engine: decode steps, admissions, settings of the host, a run, and kernel traces.

All models have random weights, so no file is needed. An engine runs as in the product. Its calls
of the device are timed from outside, by wrappers around the methods of its programs.
"""

import asyncio
import functools
import gzip
import itertools
import json
import math
import re
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from window.cases import Case, Figure, Setting, failed
from window.shapes import shape_of

ENGINE_THREAD = "engine"  # name that engine/loop.py gives it
NUM_KERNELS = 15  # kernels of a trace that become figures
COPY_RATES = {"H100": 3.0e12, "H200": 4.3e12}  # bytes/s, measured; gpu.md section 2
PROMPT_TOKENS = 27  # of a first prompt of the generated tasks


def attempt(name: str, unit: str, measure: Callable[[], Iterable[Figure]]) -> Iterator[Figure]:
    """Yield the figures of `measure`. An error, such as too little memory, becomes a note."""
    try:
        yield from measure()
    except Exception as error:  # noqa: BLE001  (the next measurement must run)
        yield failed(name, unit, error)


# Models.


def random_model(name: str) -> Any:
    """Return a LoadedModel with random bfloat16 weights and a token for each of its ids."""
    import jax
    import jax.numpy as jnp

    from lightning_jax.models.formats.load import LoadedModel
    from lightning_jax.models.transformer import init_params

    config = shape_of(name)
    params = init_params(config, jax.random.key(0), jnp.bfloat16)
    return LoadedModel(name, config, params, _tokenizer(config.shape.vocab_size))


def _tokenizer(vocab_size: int) -> Any:
    """Return the tiny model's tokenizer, with made-up words for the other ids.

    The words never occur in a prompt. They give a response text of usual length to decode.
    """
    import tokenizers
    from tokenizers import pre_tokenizers

    from lightning_jax.models.formats.find import CHATML, SPECIAL_TOKENS
    from lightning_jax.models.formats.gguf_vocab import byte_level_bpe
    from lightning_jax.models.tokenizer import Tokenizer

    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    words += [f"\u0120w{i}" for i in range(vocab_size - len(words) - len(SPECIAL_TOKENS))]
    backend = byte_level_bpe(words, [], "gpt-2")
    backend.add_tokens(
        [tokenizers.AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS]
    )
    return Tokenizer(
        backend,
        template=CHATML,
        eos_ids=[len(words) + SPECIAL_TOKENS.index("<|im_end|>")],
        special_tokens={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    )


# Clocks.


@dataclass(frozen=True)
class Call:
    """One call of the engine's thread to the device, in seconds."""

    name: str
    at: float
    cpu_at: float  # CPU time of the thread so far
    wall_s: float


@dataclass(frozen=True)
class Step:
    """Time from one decode step's dispatch to the next one's."""

    wall_s: float
    cpu_s: float  # of the engine's thread
    dispatch_s: float  # until `generate` returned
    wait_s: float  # for results
    others: tuple[str, ...]  # dispatches of other programs in between


@dataclass
class Clock:
    """Record of what the engine's thread asks of the device."""

    calls: list[Call] = field(default_factory=list)

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its calls on the engine's thread recorded."""

        @functools.wraps(function)
        def timed(*arguments: Any, **settings: Any) -> Any:
            if threading.current_thread().name != ENGINE_THREAD:
                return function(*arguments, **settings)
            at, cpu_at = time.perf_counter(), time.thread_time()
            result = function(*arguments, **settings)
            self.calls.append(Call(name, at, cpu_at, time.perf_counter() - at))
            return result

        return timed

    def wrap_methods(self, owner: Any, names: Sequence[str]) -> None:
        """Replace methods of one object by recorded ones."""
        for name in names:
            setattr(owner, name, self.wrap(name, getattr(owner, name)))

    @contextmanager
    def reads(self) -> Iterator[None]:
        """Record calls of jax.device_get as `read` within the block."""
        import jax

        original = jax.device_get
        wrapped = {"device_get": self.wrap("read", original)}
        try:
            for name, function in wrapped.items():
                setattr(jax, name, function)
            yield
        finally:
            jax.device_get = original


def steps_of(calls: Sequence[Call]) -> list[Step]:
    """Return the decode steps, each from its dispatch to the next one's."""
    starts = [index for index, call in enumerate(calls) if call.name == "generate"]
    steps = []
    for first, after in itertools.pairwise(starts):
        between = calls[first + 1 : after]
        steps.append(
            Step(
                wall_s=calls[after].at - calls[first].at,
                cpu_s=calls[after].cpu_at - calls[first].cpu_at,
                dispatch_s=calls[first].wall_s,
                wait_s=sum(call.wall_s for call in between if call.name == "read"),
                others=tuple(call.name for call in between if call.name != "read"),
            )
        )
    return steps


def plain_steps(calls: Sequence[Call]) -> list[Step]:
    """Return the steps between which nothing was admitted or ended."""
    return [step for step in steps_of(calls) if not step.others]


def median_ms(values: Iterable[float]) -> float:
    numbers = list(values)
    return 1e3 * statistics.median(numbers) if numbers else math.nan


# Running an engine.


@dataclass(frozen=True)
class Bench:
    """Running engine with a clock."""

    engine: Any
    programs: Any
    clock: Clock
    slots: int
    num_tokens: int  # of a response

    def prompts(self, number: int, seed: int) -> list[list[int]]:
        """Return prompts whose beginnings differ from each other and from those of other seeds."""
        rest = [97 + i % 23 for i in range(PROMPT_TOKENS - 2)]
        return [[row % 256, seed % 256, *rest] for row in range(number)]

    def decode(self, seed: int, num_tokens: int | None = None) -> tuple[float, int]:
        """Answer as many requests as there are slots. Return (seconds, tokens)."""
        self.clock.calls.clear()
        started = time.perf_counter()
        responses = asyncio.run(
            answer(self.engine, self.prompts(self.slots, seed), num_tokens or self.num_tokens)
        )
        return time.perf_counter() - started, sum(len(reply.token_ids) for reply in responses)

    def warm_up(self) -> None:
        """Run all programs of a measurement, and wait until no thread compiles."""
        self.decode(seed=0)
        settle()


async def answer(engine: Any, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Any]:
    """Submit all prompts at once, and return the completions of `num_tokens` tokens.

    Each has a time limit, as from the gateway.
    """
    from lightning_jax.engine.response import TimeLimit
    from lightning_jax.engine.types import SamplingParams
    from lightning_jax.system.clock import PausableClock

    sampling, now_s = SamplingParams(max_tokens=num_tokens, ignore_eos=True), PausableClock().now_s
    running = [
        engine.submit(prompt, sampling, time_limit=TimeLimit(3600.0, now_s)) for prompt in prompts
    ]
    return list(await asyncio.gather(*(generation.result() for generation in running)))


def settle(seconds: float = 120.0) -> None:
    """Wait until the engine's compiler thread has ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(thread.name == "compiler" for thread in threading.enumerate()):
            return
        time.sleep(0.05)


def make_slots(setting: Setting, slots: int, steps_per_dispatch: int = 1) -> Any:
    """Return the ServeConfig of a case, with few prefill programs to compile."""
    from lightning_jax.engine.config import ServeConfig

    return ServeConfig(
        slots=slots,
        max_len=128 if setting.is_tiny else 768,
        prefill_buckets=(32,),
        steps_per_dispatch=steps_per_dispatch,
        prefix_cache_mib=1.0 if setting.is_tiny else 256.0,
    )


def make_programs(model: Any, serve: Any) -> Any:
    """Return the product's programs on the first device."""
    import jax

    from lightning_jax.engine import engine
    from lightning_jax.models.config import MeshConfig
    from lightning_jax.models.mesh import make_mesh

    mesh = make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])
    return engine.make_programs(model.config, serve, dtype="bfloat16", mesh=mesh)[0]


@contextmanager
def running(
    setting: Setting, shape: str, slots: int, *, steps_per_dispatch: int = 1
) -> Iterator[Bench]:
    """Start an engine for a random model and close it at the end."""
    from lightning_jax.engine.engine import Engine

    if setting.is_tiny:
        shape, slots = "tiny", min(slots // 8, 16)
    model, serve = random_model(shape), make_slots(setting, slots, steps_per_dispatch)
    programs, clock = make_programs(model, serve), Clock()
    clock.wrap_methods(programs, ("generate", "prefill"))
    clock.wrap_methods(programs.pages, ("restore", "store"))
    engine = Engine(model, serve, programs=[programs])
    del model
    engine.start(slots)
    try:
        with clock.reads():
            yield Bench(engine, programs, clock, slots, 24 if setting.is_tiny else 200)
    finally:
        engine.close()


# Cases.


def _decode_figures(bench: Bench, predicted: dict[str, str]) -> Iterator[Figure]:
    bench.warm_up()
    seconds, tokens = bench.decode(seed=1)
    steps = plain_steps(bench.clock.calls)
    what = f"of {bench.slots} slots"
    note = f"median of {len(steps)} steps without an admission"
    rows = {
        "step": [step.wall_s for step in steps],
        "engine thread CPU": [step.cpu_s for step in steps],
        "dispatch": [step.dispatch_s for step in steps],
        "wait for results": [step.wait_s for step in steps],
    }
    for name, values in rows.items():
        yield Figure(f"{name} {what}", median_ms(values), "ms", predicted.get(name, ""), note)
    slow = sorted(step.wall_s for step in steps)[int(0.9 * len(steps)) :]
    yield Figure(f"slowest tenth of steps {what}", median_ms(slow), "ms", predicted.get("step", ""))
    rate = predicted.get("rate", "")
    yield Figure(f"tokens {what}", tokens / seconds, "tokens/s", rate, f"{tokens} tokens")
    stats = bench.engine.stats()
    yield Figure("tokens past the end", stats["serve/tokens_past_end"], "tokens", "0")


def _engine_135m(slots: int, setting: Setting) -> Iterator[Figure]:
    few = {
        "step": "1.5 to 2.6",
        "engine thread CPU": "0.8 to 1.7",
        "dispatch": "0.06 to 0.1",
        "wait for results": "0 to 1.5",
        "rate": f"{64 / 2.6e-3:.0f} to {64 / 1.5e-3:.0f}",
    }
    many = few | {
        "step": "2.5 to 4.2",
        "engine thread CPU": "1.6 to 3.4",
        "rate": f"{128 / 4.2e-3:.0f} to {128 / 2.5e-3:.0f}",
    }
    predicted = few if slots == 64 else many
    with running(setting, "135m", slots) as bench:
        yield from _decode_figures(bench, predicted)


def memory_bound_ms(config: Any, rows: int, context: int, rate: float) -> float:
    """Return the time to read all bfloat16 weights and the used cache of `rows` once."""
    import jax

    from lightning_jax.models.config import MeshConfig
    from lightning_jax.models.memory import decode_bytes
    from lightning_jax.models.mesh import make_mesh

    mesh = make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])
    of_weights, of_token = decode_bytes(config, mesh, "bfloat16")
    return 1e3 * (of_weights + of_token[None] * rows * context) / rate


def gpu_rate(rates: dict[str, float]) -> float:
    """Return the rate of the first device, nan if the table does not have it."""
    import jax

    kind = jax.devices()[0].device_kind
    return next((rate for name, rate in rates.items() if name in kind), math.nan)


def _engine_1_5b(setting: Setting) -> Iterator[Figure]:
    predicted = {
        "step": "2.2 to 2.6",
        "engine thread CPU": "0.8 to 1.7",
        "dispatch": "0.06 to 0.1",
        "wait for results": "0.5 to 2.2",
        "rate": f"{64 / 2.6e-3:.0f} to {64 / 2.2e-3:.0f}",
    }
    with running(setting, "1.5b", 64) as bench:
        yield from _decode_figures(bench, predicted)
        step = median_ms(step.wall_s for step in plain_steps(bench.clock.calls))
        context = PROMPT_TOKENS + bench.num_tokens // 2
        rate = gpu_rate(COPY_RATES)
        bound = memory_bound_ms(bench.programs.config, bench.slots, context, rate)
    if math.isnan(bound):
        yield failed("share of the memory bound", "%", "no copy rate for this device")
        return
    yield Figure("memory bound", bound, "ms", "1.1 (H100), 0.8 (H200)", f"{context} tokens a row")
    yield Figure("share of the memory bound", 100 * bound / step, "%", "31 to 50")


async def _arrive(bench: Bench, arrivals: int, seed: int) -> float:
    """Let requests arrive one after the other while half of the slots decode. Return seconds."""
    from lightning_jax.engine.types import SamplingParams

    engine, limit = bench.engine, bench.programs.max_len - PROMPT_TOKENS - 1
    others = [
        engine.submit(prompt, SamplingParams(max_tokens=limit, ignore_eos=True))
        for prompt in bench.prompts(bench.slots // 2, seed + 1000)
    ]
    head = [100 + i % 11 for i in range(64)]  # known to the prefix cache after the first arrival
    await answer(engine, [[*head, 65]], 2)
    bench.clock.calls.clear()
    started = time.perf_counter()
    for number in range(arrivals):
        await answer(engine, [[*head, 66 + number % 50, 70 + seed, 75]], 4)
    seconds = time.perf_counter() - started
    for generation in others:
        generation.cancel()
    await asyncio.gather(*(generation.result() for generation in others))
    return seconds


def admission_cost(calls: Sequence[Call]) -> dict[str, float]:
    """Return the mean cost of an admission and of a request's end, in ms and dispatches.

    The cost is what steps with other dispatches take beyond the median of steps without.
    """
    steps = steps_of(calls)
    plain = [step for step in steps if not step.others]
    number = sum(step.others.count("prefill") for step in steps)
    if not plain or not number:
        return {}
    usual_s = statistics.median(step.wall_s for step in plain)
    usual_cpu_s = statistics.median(step.cpu_s for step in plain)
    busy = [step for step in steps if step.others]
    return {
        "time": 1e3 * sum(step.wall_s - usual_s for step in busy) / number,
        "engine thread CPU": 1e3 * sum(step.cpu_s - usual_cpu_s for step in busy) / number,
        "dispatches": sum(len(step.others) for step in busy) / number,
    }


def _arrivals(setting: Setting) -> Iterator[Figure]:
    with running(setting, "135m", 64) as bench:
        arrivals = 8 if setting.is_tiny else 64
        asyncio.run(_arrive(bench, arrivals, seed=0))
        settle()
        seconds = asyncio.run(_arrive(bench, arrivals, seed=1))
        calls = list(bench.clock.calls)
    cost = admission_cost(calls)
    predicted = {"time": "0.4 to 0.8", "engine thread CPU": "0.3 to 0.6", "dispatches": "3"}
    note = f"mean of {arrivals} arrivals, beyond a step without; with the end of the request"
    for name, text in predicted.items():
        unit = "" if name == "dispatches" else "ms"
        if name in cost:
            yield Figure(f"admission: {name}", cost[name], unit, text, note)
        else:
            yield failed(f"admission: {name}", unit, "no step without an admission to compare with")
    walls: dict[str, list[float]] = defaultdict(list)
    for call in calls:
        walls[call.name].append(call.wall_s)
    for name in ("restore", "prefill", "store", "generate", "read"):
        note = f"median of {len(walls[name])} calls"
        if walls[name]:
            yield Figure(f"call of {name}", median_ms(walls[name]), "ms", "0.06 to 0.15", note)
    number = f"{arrivals} requests of 4 tokens"
    yield Figure("time per arrival", 1e3 * seconds / arrivals, "ms", "8 to 14", number)


async def _follow(engine: Any, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
    """Submit all prompts at once, and read each response token by token, like a stream."""
    from lightning_jax.engine.types import SamplingParams

    async def follow(generation: Any) -> None:
        async for _ in generation:
            pass

    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    await asyncio.gather(*(follow(engine.submit(prompt, sampling)) for prompt in prompts))


def _responses(setting: Setting) -> Iterator[Figure]:
    tokens = 8 if setting.is_tiny else 100
    with running(setting, "135m", 64) as bench:
        bench.warm_up()
        for what, read, predicted in (
            ("read whole", answer, "0.8 to 1.7"),
            ("streamed", _follow, "1.7"),
        ):
            bench.clock.calls.clear()
            asyncio.run(read(bench.engine, bench.prompts(bench.slots, seed=1), tokens))
            steps = plain_steps(bench.clock.calls)
            name, note = f"engine thread CPU a step, {what}", f"median of {len(steps)} steps"
            yield Figure(name, median_ms(step.cpu_s for step in steps), "ms", predicted, note)
            value = median_ms(step.wall_s for step in steps)
            yield Figure(f"step, {what}", value, "ms", "1.5 to 2.6")


@contextmanager
def _busy_thread() -> Iterator[None]:
    """Keep a thread busy with Python code, like a gateway that parses requests."""
    is_over = threading.Event()

    def count() -> None:
        total = 0
        while not is_over.is_set():
            total = (total + 1) % 1000

    thread = threading.Thread(target=count, name="busy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


# Predicted milliseconds of a step beside a busy thread, by the seconds of a switch interval.
BUSY = {0.005: "10 to 20", 0.0005: "3 to 8"}


def _switch_interval(setting: Setting) -> Iterator[Figure]:
    interval = sys.getswitchinterval()
    tokens = 8 if setting.is_tiny else 60
    try:
        with running(setting, "135m", 64) as bench:
            bench.warm_up()
            for seed, seconds in enumerate(BUSY, 1):
                sys.setswitchinterval(seconds)
                for is_busy, predicted in ((False, "1.5 to 2.6"), (True, BUSY[seconds])):
                    if is_busy:
                        with _busy_thread():
                            bench.decode(seed=seed, num_tokens=tokens)
                    else:
                        bench.decode(seed=seed, num_tokens=tokens)
                    steps = plain_steps(bench.clock.calls)
                    beside = "beside a busy thread" if is_busy else "alone"
                    name = f"step, switch interval {1e3 * seconds:g} ms, {beside}"
                    value = median_ms(step.wall_s for step in steps)
                    yield Figure(name, value, "ms", predicted, f"median of {len(steps)}")
    finally:
        sys.setswitchinterval(interval)


def _steps_per_dispatch(setting: Setting) -> Iterator[Figure]:
    for number, predicted in {1: "2.6", 4: "2.3 to 2.5", 8: "2.3 to 2.5"}.items():
        name = f"step, {number} per dispatch"

        def measure(number: int = number, predicted: str = predicted) -> Iterator[Figure]:
            with running(setting, "135m", 64, steps_per_dispatch=number) as bench:
                bench.warm_up()
                seconds, tokens = bench.decode(seed=1)
                steps = plain_steps(bench.clock.calls)
            what = f"step, {number} per dispatch"
            value = median_ms(step.wall_s / number for step in steps)
            yield Figure(what, value, "ms", predicted, f"median of {len(steps)} dispatches")
            value = median_ms(step.cpu_s / number for step in steps)
            yield Figure(f"engine thread CPU, {number} per dispatch", value, "ms", "2.7 or less")
            slowest = float(predicted.split()[-1])
            rate = f"{64e3 / slowest:.0f} or more"
            yield Figure(f"tokens, {number} per dispatch", tokens / seconds, "tokens/s", rate)

        yield from attempt(name, "ms", measure)


AGENT = '''"""Agent of three turns whose reward is the length of its replies, modulo 8."""

import openai


async def run(task, llm):
    messages, length = [{"role": "user", "content": task["question"]}], 0
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        for _ in range(3):
            reply = await client.chat.completions.create(
                model=llm.model, messages=messages, max_tokens=TOKENS
            )
            text = reply.choices[0].message.content or ""
            length += len(text)
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": "continue"},
            ]
    return length % 8 / 7
'''


def _run_config(setting: Setting, folder: Path) -> Any:
    """Return the settings of a run of random weights, saved as a model in `folder`."""
    from lightning_jax.engine.config import ServeConfig
    from lightning_jax.models.config import MeshConfig, ModelConfig
    from lightning_jax.models.formats.load import save_hf
    from lightning_jax.rl.config import AlgorithmConfig, BatchConfig, OptimizerConfig
    from lightning_jax.rollouts.config import AgentConfig, RolloutConfig
    from lightning_jax.train.config import CheckpointConfig, Config, EvalConfig

    tiny = setting.is_tiny
    folder.mkdir(parents=True, exist_ok=True)
    agent, name = folder / "agent.py", "tiny"
    agent.write_text(AGENT.replace("TOKENS", "4" if tiny else "64"))
    if not tiny:
        name = str(folder / "model")
        save_hf(Path(name), random_model("135m"))
    return Config(
        run_dir=str(folder / "run"),
        num_steps=2 if tiny else 6,
        model=ModelConfig(name=name, dtype="float32" if tiny else "bfloat16"),
        serve=ServeConfig(
            slots=4 if tiny else 64, max_len=256 if tiny else 1024, prefill_buckets=(128,)
        ),
        agent=AgentConfig(f"{agent}:run"),
        rollout=RolloutConfig(
            tasks_per_step=1 if tiny else 8, group_size=4 if tiny else 6, concurrency=64
        ),
        algorithm=AlgorithmConfig(proximal="old"),
        batch=BatchConfig(
            rows=1,
            row_len=512 if tiny else 2048,
            max_targets=128 if tiny else 2048,
            head_chunk=64 if tiny else 256,
        ),
        optimizer=OptimizerConfig(learning_rate=1e-6),
        eval=EvalConfig(every=0, num_tasks=1, at_start=False),
        checkpoint=CheckpointConfig(every=1000),
        mesh=MeshConfig(fsdp=1),
    )


def _grpo_steps(setting: Setting) -> Iterator[Figure]:
    import tempfile

    from lightning_jax.train.loop.trainer import train

    folder = Path(tempfile.mkdtemp(prefix="grpo", dir=_made(setting.work)))
    config = _run_config(setting, folder)
    tasks = [{"id": f"t{i}", "question": f"Count to {i}."} for i in range(64)]
    rows = asyncio.run(train(config, tasks, tasks[:1]))
    steps = [row for row in rows if "time/train_s" in row]
    kept = steps[2:] or steps[1:] or steps  # the first ones compile
    predicted = {"time/step_s": "1.3 to 2.0", "time/rollout_s": "1.1 to 1.8"}
    names = sorted({name for row in kept for name in row if name.startswith("time/")})
    if not names:
        yield failed("time/step_s", "s", "the run has no training step")
    for name in names:
        values = [float(row[name]) for row in kept if name in row]
        note = f"median of the last {len(values)} of {len(steps)} steps"
        yield Figure(name, statistics.median(values), "s", predicted.get(name, "below 0.3"), note)
    counts = {"serve/steps": "220", "train/num_batches": "", "rollout/num_scored": "48"}
    # The peaks are those of data sheets, of which copies and products reach about nine tenths.
    shares = {"serve/bandwidth_share": "0.1 to 0.2", "train/mfu": "0.1 to 0.2"}
    for name, expected in (counts | shares).items():
        values = [float(row[name]) for row in kept if name in row]
        if values:
            yield Figure(name, statistics.median(values), "", expected)
        elif name in shares:
            yield failed(name, "", "no peak rate for this device", expected)


# Traces.


@dataclass(frozen=True)
class Kernel:
    """Kernels and copies of one name in a trace of a GPU."""

    name: str
    count: int
    microseconds: float


def kernels_of(trace: Path) -> list[Kernel]:
    """Return what ran on the streams of GPUs in a .trace.json.gz file, longest first.

    Numbers that XLA appends to a name are dropped, so that the same kernel of all layers is one.
    """
    with gzip.open(trace, "rt") as file:
        events = json.load(file).get("traceEvents", [])
    devices, streams = set(), set()
    for event in events:
        if event.get("ph") != "M":
            continue
        name = str(event.get("args", {}).get("name", ""))
        if event.get("name") == "process_name" and "/device:GPU" in name:
            devices.add(event["pid"])
        if event.get("name") == "thread_name" and name.startswith("Stream"):
            streams.add((event["pid"], event["tid"]))
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        place = event.get("pid"), event.get("tid")
        if event.get("ph") == "X" and place[0] in devices and place in streams:
            name = re.sub(r"([._]\d+)+$", "", event["name"])
            times[name].append(float(event.get("dur", 0.0)))
    kernels = [Kernel(name, len(values), sum(values)) for name, values in times.items()]
    return sorted(kernels, key=lambda kernel: -kernel.microseconds)


def traced(folder: Path, run: Callable[[], Any]) -> list[Kernel]:
    """Return the kernels of `run`, which waits for its results, with the trace kept in `folder`."""
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1
    jax.profiler.start_trace(str(folder), profiler_options=options)
    try:
        run()
    finally:
        jax.profiler.stop_trace()
    traces = sorted(folder.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    if not traces:
        raise FileNotFoundError(f"the profiler left no trace in {folder}")
    return kernels_of(traces[-1])


def trace_figures(
    setting: Setting, what: str, number: int, run: Callable[[], Any], predicted: tuple[str, str]
) -> Iterator[Figure]:
    """Trace `number` units of work alone, and yield kernels and GPU time per unit.

    `predicted` has both. All kernels go to a JSON file in `setting.out`.
    """
    import tempfile

    prefix = f"trace_{what.replace(' ', '_')}"
    kernels = traced(Path(tempfile.mkdtemp(prefix=prefix, dir=_made(setting.work))), run)
    if not kernels:
        yield failed(f"{what}: kernels", "", "the trace has no stream of a GPU")
        return
    rows = {"what": what, "number": number, "kernels": [asdict(kernel) for kernel in kernels]}
    _made(setting.out)
    (setting.out / f"{prefix}.json").write_text(json.dumps(rows, indent=1))
    note = f"{number} of them in the trace"
    count = sum(kernel.count for kernel in kernels) / number
    yield Figure(f"{what}: kernels and copies", count, "", predicted[0], note)
    microseconds = sum(kernel.microseconds for kernel in kernels) / number
    yield Figure(f"{what}: GPU time", microseconds, "us", predicted[1], note)
    for kernel in kernels[:NUM_KERNELS]:
        share = f"{kernel.count / number:g} each"
        name = f"{what}: {kernel.name[:80]}"
        yield Figure(name, kernel.microseconds / number, "us", "", share)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@dataclass
class Programs:
    """Programs of an engine with their state, without the engine."""

    programs: Any
    params: Any
    state: Any
    pool: Any
    table: Any

    def admit(self, slot: int) -> None:
        """Fill a slot as engine/prefill.py does for a prompt whose beginning is cached."""
        import dataclasses

        from lightning_jax.engine.device.pages import PAGE, Move
        from lightning_jax.engine.device.slots import Fill
        from lightning_jax.engine.types import SamplingParams

        programs, pages = self.programs, self.programs.pages
        ids = [97 + i % 23 for i in range(8)]
        cache = pages.restore(self.state.cache, self.pool, [Move(0, slot, 0), Move(1, slot, 1)])
        start = 2 * PAGE
        cache = programs.prefill(self.params, cache, [Fill(slot, start, ids)])
        self.pool = pages.store(self.pool, cache, [Move(2, slot, 2)])
        self.table.begin(slot, 97, start + len(ids), SamplingParams(), slot)
        self.state = dataclasses.replace(self.state, cache=cache)

    def admit_all(self, number: int) -> None:
        import jax

        for slot in range(number):
            self.admit(slot)
        jax.block_until_ready((self.state, self.pool))

    def decode(self, number: int) -> None:
        import jax

        sampled = None
        for _ in range(number):
            self.state, sampled = self.programs.generate(
                self.params,
                self.state,
                self.table,
                range(self.programs.num_slots),
                has_filters=False,
            )
            jax.device_get(sampled)


def _traces(setting: Setting) -> Iterator[Figure]:
    from lightning_jax.engine.device.table import SlotTable

    shape, slots = ("tiny", 16) if setting.is_tiny else ("135m", 64)
    model = random_model(shape)
    programs = make_programs(model, make_slots(setting, slots))
    params = programs.put_on_mesh(model.params)
    state, pool = programs.init_state(), programs.pages.init_pool()
    bench = Programs(programs, params, state, pool, SlotTable(programs.num_slots))
    bench.admit_all(slots)
    bench.decode(3)
    decode = functools.partial(bench.decode, 20)
    yield from attempt(
        "decode step: kernels",
        "",
        lambda: trace_figures(
            setting, "decode step", 20, decode, ("415, 413 of them kernels", "1000")
        ),
    )
    admit = functools.partial(bench.admit_all, 16)
    yield from attempt(
        "admission: kernels",
        "",
        lambda: trace_figures(setting, "admission", 16, admit, ("447 kernels and 3 copies", "300")),
    )


# Steps and CPU are predicted from an H200's step of 12 ms in a run: 2.6 ms once a step and an
# admission take few arrays, and 1.5 to 2.0 once nobody cuts chunks for calls that do not stream.
# The thread's CPU falls by what fewer arrays save, a third of 2.7 ms (`host_cost.py`), and then to
# the bar of 0.8.
CASES = (
    Case(
        "engine_135m_64",
        1.2,
        "step, CPU and waits of an engine alone, 64 requests of 200 tokens",
        functools.partial(_engine_135m, 64),
    ),
    Case("grpo_steps", 2.2, "phases of GRPO steps with 48 rollouts of 3 calls", _grpo_steps),
    Case("arrivals_135m_64", 1.1, "cost of an admission while others decode", _arrivals),
    Case(
        "steps_per_dispatch", 1.8, "a step with 1 and more steps per dispatch", _steps_per_dispatch
    ),
    Case("engine_1_5b_64", 1.2, "a step of 1.5B, and its share of the memory bound", _engine_1_5b),
    Case("responses", 0.7, "CPU of a step for calls that are read whole and streamed", _responses),
    Case("switch_interval", 0.8, "a step beside a busy thread, 5 and 0.5 ms", _switch_interval),
    Case("traces", 1.0, "kernels of 20 decode steps, then of 16 admissions", _traces),
    Case(
        "engine_135m_128",
        1.2,
        "step, CPU and waits of an engine alone, 128 requests of 200 tokens",
        functools.partial(_engine_135m, 128),
    ),
)
