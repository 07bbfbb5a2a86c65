"""Speeds of chips and durations of agents that the simulation of layouts is fed with.

Each number has its source. All are of models with 8 billion parameters in bfloat16, which engine
and trainer hold whole: an H100 as an engine of its own, a TPU v5e as an eighth of one.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from layouts_sim import EngineRates, Layout, PythonCosts, Turn, Workload

PARAMETERS = 8.03e9  # Llama 3.1 8B
PREFILL_SHARE = 0.5  # of the peak of matrix products; an assumption
MICROBATCH_TOKENS = 8192  # of one chip; an assumption
HOST_CHIPS = 8
HOST_WORKERS = 32  # processes for agents on each host


@dataclass(frozen=True)
class Chip:
    """Measured speeds of one kind of chip."""

    name: str
    engine_chips: int  # chips of one engine
    engine: EngineRates
    train_tokens_per_s: float  # of one chip, forward and backward
    reshard_s: float  # weights to all engines in one process
    publish_s: float  # from the trainer's processes to all engines


def _engine(
    slots: int, one_s: float, full_s: float, peak_flops: float, engine_chips: int
) -> EngineRates:
    """Return rates from the decode steps of one request and of all slots."""
    per_request = (full_s - one_s) / (slots - 1)
    prefill = PREFILL_SHARE * peak_flops * engine_chips / (2 * PARAMETERS)
    return EngineRates(slots, one_s - per_request, per_request, prefill)


# Decode step of one request: 6.48 ms, vLLM 0.21, float16, one H100 80GB, 2026-05-16
# (yobitelcomm.github.io/bench/recipes/concurrency-sweep). Of 256 slots: 25.57 ms, 8,088 tokens/s,
# vLLM 0.6.0, one H100 SXM, 5,000 prompts of ShareGPT (github.com/LambdaLabsML/vllm-benchmark,
# benchmark_v0.md). Peak 989 TFLOP/s (NVIDIA's data sheet of the H100 SXM).
# Training: 7,500 tokens/s a GPU, Llama 2 7B, FSDP, 96 H100 (github.com/foundation-model-stack/
# fms-fsdp), scaled to 8.03e9 parameters.
# Weights, by arithmetic: 16 GB gathered by each chip at 50 GB/s; between processes 25 GB/s (400
# Gbit/s a host, half of it used), twice for a tree.
H100 = Chip(
    name="H100",
    engine_chips=1,
    engine=_engine(256, 6.48e-3, 25.57e-3, 989e12, 1),
    train_tokens_per_s=7500 * 6.74e9 / PARAMETERS,
    reshard_s=16.06 / 50,
    publish_s=2 * 16.06 / 25,
)

# All 128 slots: 8,249 tokens/s, Llama 3 8B, bfloat16, v5e-8, 2024-04-24
# (github.com/AI-Hypercomputer/jetstream-pytorch, benchmarks/summary.md). One request: the weights
# at 819 GB/s a chip (docs.cloud.google.com/tpu/docs/v5e), of which 74 % are reached, as on the
# H100. Peak 197 TFLOP/s (same page).
# Training: 120 TFLOP/s a chip, 16B, one v5e-256 (github.com/google/maxtext, MaxText/configs/v5e).
# Weights, by arithmetic: 2 GB gathered by each chip at 45 GB/s; between processes 12.5 GB/s (100
# Gbit/s a host), twice for a tree.
V5E = Chip(
    name="TPU v5e",
    engine_chips=8,
    engine=_engine(128, 16.06 / (8 * 819 * 0.74), 128 / 8249, 197e12, 8),
    train_tokens_per_s=120e12 / (6 * PARAMETERS),
    reshard_s=16.06 / 8 / 45,
    publish_s=2 * 16.06 / 12.5,
)
CHIPS = {chip.name: chip for chip in (H100, V5E)}

# Importance weights need log-probabilities of the trainer before its update: a forward pass more,
# which costs a third of forward and backward.
OLD_POLICY = 4 / 3

# CPU time of a call (issue 35): the gateway 2.2 ms with a prompt of 300 tokens and a short answer,
# AMD EPYC, November 2026; agents/spider_sql.py 6.2 ms. Per token 7 us (benchmarks/gateway.py, 4 to
# 10 us). A decode step takes the engine's thread about 1 ms of Python; an estimate.
PYTHON = PythonCosts(agent_s=6.2e-3, gateway_s=2.2e-3, token_s=7e-6, step_s=1e-3)


def log_normal(
    rng: np.random.Generator, median: float, p90: float, most: float, size: int
) -> list[float]:
    """Return values of a log-normal distribution, none above `most`."""
    sigma = math.log(p90 / median) / 1.2816
    return np.minimum(median * np.exp(sigma * rng.standard_normal(size)), most).tolist()


def from_quantiles(rng: np.random.Generator, row: dict[str, float], size: int) -> list[float]:
    """Return values of a distribution given by quantiles, linear between them."""
    points = sorted((float(key), value) for key, value in row.items() if key[0].isdigit())
    probabilities, values = zip(*points, strict=True)
    return np.interp(rng.random(size), probabilities, values).tolist()


def coding_turns(rng: np.random.Generator) -> Sequence[Turn]:
    """Draw the turns of a coding agent.

    Tools: median 0.3 s, 90 % below 13.6 s, as in 432,510 calls of coding agents
    (github.com/uw-syfi/TraceLab, June 2026; their mean is 18.4 s and their 99 % is 216 s), at most
    300 s. Numbers of calls and tokens are assumptions.
    """
    size = int(log_normal(rng, 15, 30, 60, 1)[0]) + 1
    tools = log_normal(rng, 0.3, 13.6, 300.0, size)
    prompts = log_normal(rng, 300, 1200, 8000, size)
    responses = log_normal(rng, 120, 400, 2048, size)
    return [Turn(*turn) for turn in zip(prompts, responses, tools, strict=True)]


CALCX = Path(__file__).with_name("calcx_turns.json")


def calculator_turns(rng: np.random.Generator) -> Sequence[Turn]:
    """Draw the turns of the calculator agent as a run of `make calcx` recorded them.

    The prompt of a group is in the prefix cache but for its first rollout, so first prompts count
    as shared.
    """
    table = json.loads(CALCX.read_text())
    size = round(float(from_quantiles(rng, table["num_calls"], 1)[0]))
    added = [0.0, *from_quantiles(rng, table["added_prompt_tokens"], size - 1)]
    responses = from_quantiles(rng, table["response_tokens"], size)
    tools = from_quantiles(rng, table["tool_s"], size)
    return [Turn(*turn) for turn in zip(added, responses, tools, strict=True)]


def coding(rollouts: int) -> Workload:
    """Return a workload of coding agents with this many rollouts a step, in groups of 8."""
    return Workload(rollouts // 8, 8, coding_turns, shared_tokens=2000)


def calculator(rollouts: int) -> Workload:
    """Return a workload of calculator agents with this many rollouts a step, in groups of 8."""
    return Workload(rollouts // 8, 8, calculator_turns, shared_tokens=250)


WORKLOADS = {"coding agent": coding, "calculator agent": calculator}


def _whole(chip: Chip, chips: int, ahead: int, decode_share: float | None) -> Layout:
    """Return a layout in which all chips serve and train, with an interpreter for each engine."""
    engines = chips // chip.engine_chips
    return Layout(
        "all chips",
        num_engines=engines,
        train_tokens_per_s=chips * chip.train_tokens_per_s / (OLD_POLICY if ahead else 1),
        publish_s=chip.reshard_s,
        ahead=ahead,
        decode_share=decode_share,
        num_interpreters=engines,
        num_workers=HOST_WORKERS * (chips // HOST_CHIPS),
    )


def lock_step(chip: Chip, chips: int) -> Layout:
    """Return a run in lock step in which all chips serve and train."""
    return _whole(chip, chips, 0, None)


def lock_step_in_one_process(chip: Chip, chips: int) -> Layout:
    """Return a run whose first process serves with the chips of its host and runs the agents."""
    return Layout(
        "first host serves",
        num_engines=HOST_CHIPS // chip.engine_chips,
        train_tokens_per_s=chips * chip.train_tokens_per_s,
        publish_s=chip.reshard_s,
    )


def shared(chip: Chip, chips: int, ahead: int) -> Layout:
    """Return a run ahead of the trainer on devices that both sides share.

    During an update a decode step runs after each microbatch.
    """
    decode_s = chip.engine.step_s + chip.engine.slots * chip.engine.step_s_per_request
    microbatch_s = MICROBATCH_TOKENS / chip.train_tokens_per_s
    return _whole(chip, chips, ahead, decode_s / (decode_s + microbatch_s))


def disjoint(chip: Chip, chips: int, ahead: int, sampling_chips: int) -> Layout:
    """Return a run whose samplers and trainer have devices and processes of their own."""
    engines = sampling_chips // chip.engine_chips
    return Layout(
        f"{sampling_chips} chips sample",
        num_engines=engines,
        train_tokens_per_s=(chips - sampling_chips) * chip.train_tokens_per_s / OLD_POLICY,
        publish_s=chip.publish_s,
        ahead=ahead,
        num_interpreters=engines,
        num_workers=HOST_WORKERS * (chips // HOST_CHIPS),
    )


def disjoint_in_one_process(chip: Chip, chips: int, ahead: int, sampling_chips: int) -> Layout:
    """Return a run of one process with devices of their own for engines and trainer.

    With several hosts, only devices of the first serve.
    """
    sampling = min(sampling_chips, HOST_CHIPS)
    return Layout(
        f"{sampling} chips sample",
        num_engines=max(sampling // chip.engine_chips, 1),
        train_tokens_per_s=(chips - sampling) * chip.train_tokens_per_s / OLD_POLICY,
        publish_s=chip.reshard_s,
        ahead=ahead,
    )
