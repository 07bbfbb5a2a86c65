"""Updates that trainers are measured on, and their timing.

The peers' scripts run in other environments, so only Python's standard library is imported here.

    a  4 calls of 384 prompt and 128 response tokens that share nothing: a flat batch of 4 x 512
    b  a recorded group of 4 rollouts of 4 turns: 256 tokens first, the same for all; a prompt is
       the one before, its response of 24 to 48 tokens and an observation of 32 to 72

Every response token has the same weight, and the sampling policy is the one being trained. So all
trainers minimize the sum of -advantage * log-probability over the number of response tokens. The
norm of that gradient, before clipping to 1, shows whether they did the same work.
"""

import argparse
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version

from workloads import cpu_s, peak_mib, tokens

LEARNING_RATE, MAX_GRAD_NORM = 1e-6, 1.0


@dataclass(frozen=True)
class Call:
    """One call of an agent: prompt, response and advantage."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    advantage: float


@dataclass(frozen=True)
class Result:
    """Cost of the updates on one workload, including the first update, which may compile."""

    seconds: tuple[float, ...]
    cpu_s: tuple[float, ...]
    peak_mib: float | None
    grad_norm: float  # at the first update
    computed: int  # tokens through the model per update, including padding
    limit_s: float | None = None  # time of the update's matrix products alone
    gflops: float | None = None  # speed of a large matrix product, which gives the limit
    naive_to_forest: float | None = None  # tokens of the calls divided by tokens of their forest


def flat(shrink: int) -> list[Call]:
    """Return workload a, with its lengths divided by `shrink`."""
    rng = random.Random("flat")
    return [
        Call(tuple(tokens(rng, 384 // shrink)), tuple(tokens(rng, 128 // shrink)), advantage)
        for advantage in (1.0, -1.0, 1.0, -1.0)
    ]


def group(shrink: int) -> list[Call]:
    """Return workload b, with its lengths divided by `shrink`."""
    rng, calls = random.Random("group"), []
    first = tokens(rng, 256 // shrink)
    for advantage in (1.0, -1.0, 1.0, -1.0):
        prompt = first
        for _ in range(4):
            response = tokens(rng, rng.randint(24, 48) // shrink)
            calls.append(Call(tuple(prompt), tuple(response), advantage))
            prompt = [*prompt, *response, *tokens(rng, rng.randint(32, 72) // shrink)]
    return calls


WORKLOADS = {"a": flat, "b": group}


def num_tokens(calls: Sequence[Call]) -> int:
    """Return the number of tokens of the calls one by one, without padding."""
    return sum(len(call.prompt) + len(call.response) for call in calls)


class Clock:
    """Timer that records each interval between `start` and `stop`."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cpu_s: list[float] = []

    def start(self) -> None:
        self._cpu_s, self._started = cpu_s(os.getpid()) or 0.0, time.perf_counter()

    def stop(self) -> None:
        self.seconds.append(time.perf_counter() - self._started)
        self.cpu_s.append((cpu_s(os.getpid()) or 0.0) - self._cpu_s)

    def result(self, *, grad_norm: float, computed: int) -> Result:
        """Return the result of all updates so far.

        Call it before anything else allocates memory.
        """
        return Result(
            tuple(self.seconds), tuple(self.cpu_s), peak_mib(os.getpid()), grad_norm, computed
        )


def main(
    measure: Callable[[argparse.Namespace, Sequence[Call]], Result],
    packages: Sequence[str],
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> None:
    """Run one trainer's script: print a JSON line with versions, then one with the result."""
    parser = argparse.ArgumentParser(description="Measure the updates of a trainer.")
    parser.add_argument("model", help="a Hugging Face directory")
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--steps", type=int, default=3, help="updates after the first")
    parser.add_argument("--shrink", type=int, default=1, help="divide all lengths by this")
    add_arguments(parser)
    args = parser.parse_args()
    print(json.dumps({"versions": {name: version(name) for name in packages}}), flush=True)
    result = measure(args, WORKLOADS[args.workload](args.shrink))
    print(json.dumps(asdict(result)), flush=True)
