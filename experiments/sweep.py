"""Runs of one experiment under several settings, one or more at a time.

Every run has a process of its own. Finished runs are kept.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from lightning_jax.errors import UserError
from lightning_jax.settings import ConfigError, load_config
from lightning_jax.train.config import Config
from lightning_jax.train.directory import read_end

POLL_S = 0.2  # between two looks at running processes


@dataclass(frozen=True)
class Training:
    """A run's directory, the command that trains it, and variables that the command needs."""

    directory: Path
    words: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def log(self) -> Path:
        """File with the output of the command, beside the directory."""
        return self.directory.with_suffix(".log")


@dataclass(frozen=True)
class _Child:
    training: Training
    process: subprocess.Popen[bytes]
    started: float  # by the monotonic clock


def add_flags(parser: argparse.ArgumentParser, *, num_seeds: int, num_jobs: int = 1) -> None:
    """Add the flags that `run_all` reads, except `--config`."""
    parser.add_argument(
        "--seeds", type=count, default=num_seeds, help="number of them (%(default)s)"
    )
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--jobs", type=count, default=num_jobs, help="runs at once, 6 GB each (%(default)s)"
    )
    parser.add_argument("--report", action="store_true", help="only report runs that have finished")
    parser.add_argument("settings", nargs="*", metavar="key=value")


def count(text: str) -> int:
    """Return the number that a flag has. Raises ArgumentTypeError unless it is 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def load_settings(args: argparse.Namespace) -> Config:
    """Return the settings that all runs share. Exits with one sentence if they cannot be used."""
    try:
        return load_config(Config, [args.config, *args.settings])
    except ConfigError as error:
        refuse(error)


def refuse(error: UserError) -> NoReturn:
    """Exit as argparse does for arguments that cannot be used."""
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)


def run_all(
    args: argparse.Namespace, variants: Mapping[str, Sequence[str]], parent: Path
) -> dict[str, list[Path]]:
    """Train every variant with every seed, and return the directories of finished runs by variant.

    `variants` are settings by name. With `--report` nothing is trained. Exits with one sentence if
    a run fails or none has finished.
    """
    directories: dict[str, list[Path]] = {name: [] for name in variants}
    trainings: list[Training] = []
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for name, settings in variants.items():
            directory = parent / f"{name}-{seed}"
            more = (*settings, *args.settings, f"seed={seed}", f"run_dir={directory}")
            trainings.append(Training(directory, command("--config", args.config, *more)))
            directories[name].append(directory)
    if not args.report:
        train(trainings, args.jobs)
    finished = {name: [*filter(has_finished, paths)] for name, paths in directories.items()}
    with_runs = {name: paths for name, paths in finished.items() if paths}
    if not with_runs:
        sys.exit(f"{parent} has no finished run; run without --report first")
    return with_runs


def command(*arguments: str) -> list[str]:
    """Return the command line of a training."""
    return [sys.executable, "-m", "lightning_jax", "train", *arguments]


def train(trainings: Sequence[Training], num_jobs: int = 1) -> None:
    """Train or resume each run that has not finished, at most `num_jobs` at once.

    A run that learned nothing has finished too. Exits with one sentence if a run fails, once those
    beside it have ended. After Ctrl-C, wait until the running ones have saved.
    """
    waiting = deque(item for item in trainings if not has_finished(item.directory))
    running: list[_Child] = []
    failures: list[str] = []
    try:
        while running or (waiting and not failures):
            while waiting and not failures and len(running) < num_jobs:
                running.append(_start(waiting.popleft()))
            for child in [child for child in running if child.process.poll() is not None]:
                running.remove(child)
                failures += _end(child)
            time.sleep(POLL_S)
    except KeyboardInterrupt:  # which the children got, too
        print("stopping: waiting for the runs to save (Ctrl-C again: stop now)", flush=True)
        _wait_or_kill(running)
        sys.exit("stopped; run the same command to resume")
    if failures:
        sys.exit("; ".join(failures))


def _start(training: Training) -> _Child:
    training.directory.parent.mkdir(parents=True, exist_ok=True)
    print(f"{training.directory}: training; its output is in {training.log}", flush=True)
    variables = {**os.environ, **training.environment}
    with training.log.open("w") as output:
        process = subprocess.Popen(training.words, env=variables, stdout=output, stderr=output)
    return _Child(training, process, time.monotonic())


def _end(child: _Child) -> list[str]:
    """Say how long an ended run took, or return the sentence that says why it failed."""
    directory, log = child.training.directory, child.training.log
    if has_finished(directory):
        print(f"{directory}: {time.monotonic() - child.started:.0f} s", flush=True)
        return []
    last = (log.read_text(errors="replace").strip() or "no output").splitlines()[-1]
    code = child.process.returncode
    return [f"{directory} ended with status {code}: {last}; {log} has all of its output"]


def _wait_or_kill(running: Sequence[_Child]) -> None:
    try:
        for child in running:
            child.process.wait()
    except KeyboardInterrupt:
        for child in running:
            child.process.kill()


def has_finished(directory: Path) -> bool:
    """Return True if a run in the directory ended by itself."""
    end = read_end(directory)
    return end is not None and end.status == "finished"


def mean_and_error(values: Sequence[float], spec: str = ".3f") -> str:
    """Return the mean and, for two values or more, its standard error, both in this format."""
    mean = format(statistics.fmean(values), spec)
    if len(values) < 2:
        return mean
    return f"{mean} ± {format(statistics.stdev(values) / len(values) ** 0.5, spec)}"
