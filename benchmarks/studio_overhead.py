"""Measure how much people who watch the live page slow a training.

    python benchmarks/studio_overhead.py [--steps 24] [--pages 10] [--model smollm2-135m-instruct]
                                         [--separate] [--set key=value ...]

Trains the starter's agent with `train --studio`, or with `--separate` with `lightning-jax studio`
beside it. Steps follow the pattern closed, open, open, closed, so that a trend over the steps
cancels. While it is open, each page listens for events, asks every two seconds for what runs now,
and reads the run, its curves and its groups after each change, as the page in a browser does.

A pair is a step with pages and its neighbor without. The result is the mean of the ratios of their
times with its standard error over pairs. The learning rate is close to 0, so that the lengths of
the responses do not drift. The pages are requested from this process, at a low priority. If it
shares the cores with the training, the ratio includes what it takes from them.
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

WARM_UP = 4  # steps that compile
LIVE_S, REDRAW_S = 2.0, 2.0  # as in run.js and app.js
START_S = 600.0
CURVES = "rollout/reward_mean,eval/reward_mean,train/entropy,train/tokens_per_s,time/step_s"
COMMAND = (sys.executable, "-m", "lightning_jax")
SETTINGS = (
    *("eval.every=0", "eval.at_start=false", "checkpoint.every=1000", "warmup.num_steps=0"),
    *("optimizer.learning_rate=1e-12", "rollout.tasks_per_step=4", "run_dir=runs/measured"),
)


@dataclass
class Traffic:
    """Counters of what the pages did."""

    num_requests: int = 0
    num_events: int = 0
    num_failures: int = 0


def is_open(step: int) -> bool:
    """Return whether pages are open in a step after the warm-up: closed, open, open, closed."""
    return step >= WARM_UP and (step - WARM_UP) % 4 in (1, 2)


def ratios(seconds: Sequence[float]) -> list[float]:
    """Return the ratio of each pair of neighboring steps, with pages to without."""
    shares = []
    for step in range(WARM_UP, len(seconds) - 1, 2):
        pair = {is_open(at): seconds[at] for at in (step, step + 1)}
        shares.append(pair[True] / pair[False])
    return shares


class Viewer:
    """One page that is open in a browser."""

    def __init__(self, session: aiohttp.ClientSession, url: str, traffic: Traffic) -> None:
        self._session, self._url, self._traffic = session, url, traffic
        self._changed = asyncio.Event()

    async def watch(self) -> None:
        """Do what the page of a run does, until cancelled."""
        runs = await self._get("api/runs")
        self._run = f"api/runs/{runs['runs'][0]['key']}"
        async with asyncio.TaskGroup() as group:
            for task in (self._follow(), self._poll(), self._redraw()):
                group.create_task(task)

    async def _get(self, path: str) -> dict:
        try:
            async with self._session.get(self._url + path) as response:
                self._traffic.num_requests += 1
                response.raise_for_status()
                return await response.json()
        except aiohttp.ClientError:
            self._traffic.num_failures += 1
            return {}

    async def _follow(self) -> None:
        async with self._session.get(f"{self._url}api/events") as response:
            async for line in response.content:
                if line.startswith(b"event:"):
                    self._traffic.num_events += 1
                    self._changed.set()

    async def _poll(self) -> None:
        while True:
            await self._get(f"{self._run}/live")
            await asyncio.sleep(LIVE_S)

    async def _redraw(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._get(self._run)
            await self._get(f"{self._run}/live")
            await self._get(f"{self._run}/metrics?names={CURVES}")
            await self._get(f"{self._run}/groups?phase=train&limit=25&order=task")
            await asyncio.sleep(REDRAW_S)


@contextlib.asynccontextmanager
async def viewers(address: tuple[str, str], number: int, traffic: Traffic) -> AsyncIterator[None]:
    """Keep this many pages open."""
    timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
    url, headers = address[0], {"Authorization": f"Bearer {address[1]}"}
    async with aiohttp.ClientSession(
        timeout=timeout, connector=connector, headers=headers
    ) as session:
        tasks = [asyncio.create_task(Viewer(session, url, traffic).watch()) for _ in range(number)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(outcome, Exception):
                    traffic.num_failures += 1


def rows_of(path: Path) -> list[float]:
    """Return the seconds of the steps that have ended."""
    if not path.is_file():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return [row["time/step_s"] for row in rows if "time/step_s" in row]


async def measure(arguments: argparse.Namespace, folder: Path) -> tuple[list[float], Traffic]:
    """Train, open and close pages as the steps go by, and return the seconds of the steps."""
    subprocess.run([*COMMAND, "new", "dates"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    project, log = folder / "dates", folder / "train.log"
    settings = [*SETTINGS, f"model.name={arguments.model}", f"num_steps={arguments.steps}"]
    command = [*COMMAND, "train", *["--studio"] * (not arguments.separate)]
    traffic, seconds = Traffic(), []
    with log.open("w") as output, contextlib.ExitStack() as processes:
        train = subprocess.Popen(
            [*command, *settings, *arguments.set], cwd=project, stdout=output, stderr=output
        )
        processes.callback(stop, train, 60.0)
        metrics = project / "runs" / "measured" / "metrics.jsonl"
        address = ("", "") if arguments.separate else await url_in(log, train)
        if arguments.separate:
            await until_exists(project / "runs" / "measured" / "store.sqlite", train)
            studio_log = folder / "studio.log"
            studio = subprocess.Popen(
                [*COMMAND, "studio", "runs", "--port", "0"],
                cwd=project,
                stderr=processes.enter_context(studio_log.open("w")),
            )
            processes.callback(stop, studio, 0.0)
            address = await url_in(studio_log, studio)
        os.nice(10)  # of this process alone
        async with contextlib.AsyncExitStack() as opened:
            are_open = False
            while len(seconds) < arguments.steps and train.poll() is None:
                seconds = rows_of(metrics)
                if is_open(len(seconds)) != are_open:
                    are_open = not are_open
                    if are_open:
                        await opened.enter_async_context(viewers(address, arguments.pages, traffic))
                    else:
                        await opened.aclose()
                await asyncio.sleep(0.05)
    if len(rows_of(metrics)) < arguments.steps:
        sys.exit(f"the training ended early:\n{log.read_text()[-2000:]}")
    return rows_of(metrics), traffic


def stop(process: subprocess.Popen, patience_s: float) -> None:
    """Give a process some time to end, then end it."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience_s)
    process.terminate()
    process.wait()


async def until_exists(path: Path, process: subprocess.Popen) -> None:
    end = time.monotonic() + START_S
    while not path.exists() and process.poll() is None and time.monotonic() < end:
        await asyncio.sleep(0.2)


async def url_in(log: Path, process: subprocess.Popen) -> tuple[str, str]:
    """Return the URL of the page and its key, once the log has them."""
    end = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end:
        if match := re.search(r"(?:run|page) at (http://\S+/)#key=(\S+)", log.read_text()):
            return match[1], match[2]
        await asyncio.sleep(0.2)
    sys.exit(f"no page was served:\n{log.read_text()[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=WARM_UP + 24)
    parser.add_argument("--pages", type=int, default=10)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--separate", action="store_true")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seconds, traffic = asyncio.run(measure(arguments, Path(folder)))
    shares = ratios(seconds)
    with_pages = [took for step, took in enumerate(seconds) if is_open(step)]
    without = [took for step, took in enumerate(seconds) if step >= WARM_UP and not is_open(step)]
    error = statistics.stdev(shares) / math.sqrt(len(shares)) if len(shares) > 1 else math.nan
    print(
        f"seconds a step, median: {statistics.median(without):.3f} closed, "
        f"{statistics.median(with_pages):.3f} with {arguments.pages} pages "
        f"({traffic.num_requests} requests, {traffic.num_events} events, "
        f"{traffic.num_failures} failures)"
    )
    print(
        f"step time with pages / without: {statistics.fmean(shares):.4f} ± {error:.4f} "
        f"({len(shares)} pairs of steps)"
    )


if __name__ == "__main__":
    main()
