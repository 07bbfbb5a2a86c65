"""Common code of the peers' scripts: requests from coroutines, engines that run in steps.

    PYTHON run_X.py MODEL [--dtype float32|bfloat16] [--only W1 W2]

MODEL is a Hugging Face directory. The engine runs in the script's own process, without server or
HTTP. The script prints one JSON line with versions, then one per workload.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

sys.path.insert(0, str(Path(__file__).parents[1]))

from workloads import SHORT, Reply, measure_twice

Report = Callable[[int, Sequence[int]], None]  # new tokens of a request, as soon as sampled


class Stepper(Protocol):
    """Engine that works on its requests only when `step` is called."""

    def add(self, number: int, prompt: Sequence[int], new: int) -> None:
        """Add a request for exactly `new` tokens, sampled at temperature 1."""
        ...

    def step(self, report: Report) -> None:
        """Run one unit of work, which usually reports at least one token."""
        ...


class Requests:
    """Requests of coroutines, which wait for their tokens while one task steps the engine."""

    def __init__(self, engine: Stepper) -> None:
        self._engine = engine
        self._found: dict[int, list[tuple[int, float]]] = {}
        self._wanted: dict[int, tuple[int, asyncio.Future[None]]] = {}
        self._steps: asyncio.Task[None] | None = None

    async def ask(self, prompt: Sequence[int], new: int) -> Reply:
        """Return a response of exactly `new` tokens."""
        started, number = time.perf_counter(), len(self._found)
        self._found[number] = []
        done = asyncio.get_running_loop().create_future()
        self._wanted[number] = new, done
        self._engine.add(number, prompt, new)
        if self._steps is None or self._steps.done():
            self._steps = asyncio.create_task(self._run())
        await done
        token_ids, times = zip(*self._found[number], strict=True)
        return Reply(token_ids, tuple(at - started for at in times))

    async def _run(self) -> None:
        while self._wanted:
            try:
                self._engine.step(self._report)
            except BaseException as error:
                for _, done in self._wanted.values():
                    done.set_exception(error)
                raise
            await asyncio.sleep(0)  # finished callers may ask again before the next step

    def _report(self, number: int, token_ids: Sequence[int]) -> None:
        now = time.perf_counter()
        self._found[number] += [(token_id, now) for token_id in token_ids]
        new, done = self._wanted[number]
        if len(self._found[number]) >= new:
            assert len(self._found[number]) == new, f"{len(self._found[number])} of {new} tokens"
            del self._wanted[number]
            done.set_result(None)


def main(make: Callable[[str, str], Stepper], packages: Sequence[str]) -> None:
    """Measure the engine that `make` builds from a model's directory and the name of a dtype."""
    parser = argparse.ArgumentParser(description="Measure an engine in this process.")
    parser.add_argument("model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--only", nargs="+", choices=SHORT, default=SHORT)
    args = parser.parse_args()
    print(json.dumps({"versions": {name: version(name) for name in packages}}), flush=True)
    engine = make(args.model, args.dtype)
    for name in args.only:
        result = asyncio.run(measure_twice(Requests(engine).ask, name, os.getpid()))
        print(json.dumps({"workload": name, **asdict(result)}), flush=True)
