"""Runs of one experiment under several settings.

Every run has a process of its own. Finished runs are kept.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from lightning_jax.settings import ConfigError, load_config
from lightning_jax.train.config import Config
from lightning_jax.train.status import read_end


def add_flags(parser: argparse.ArgumentParser, *, num_seeds: int) -> None:
    """Add the flags that `run_all` reads, except `--config`."""
    parser.add_argument("--seeds", type=int, default=num_seeds, help="number of them (%(default)s)")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--report", action="store_true", help="only report runs that have finished")
    parser.add_argument("settings", nargs="*", metavar="key=value")


def load_settings(args: argparse.Namespace) -> Config:
    """Return the settings that all runs share. Exits with one sentence if they cannot be used."""
    try:
        return load_config(Config, [args.config, *args.settings])
    except ConfigError as error:
        refuse(error)


def refuse(error: ConfigError) -> NoReturn:
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
    found: dict[str, list[Path]] = {}
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for name, settings in variants.items():
            directory = parent / f"{name}-{seed}"
            more = (*settings, *args.settings, f"seed={seed}", f"run_dir={directory}")
            if not args.report:
                train(directory, command("--config", args.config, *more))
            if has_finished(directory):
                found.setdefault(name, []).append(directory)
    if not found:
        sys.exit(f"{parent} has no finished run; run without --report first")
    return {name: found[name] for name in variants if name in found}


def command(*arguments: str) -> list[str]:
    """Return the command line of a training."""
    return [sys.executable, "-m", "lightning_jax", "train", *arguments]


def train(
    directory: Path, words: Sequence[str], environment: Mapping[str, str] | None = None
) -> None:
    """Train in a child process, or resume, unless the run in the directory has finished.

    Its output is in a file beside the directory. A run that learned nothing has finished too.
    Exits with one sentence if it fails. After Ctrl-C, wait until the run has saved.
    """
    if has_finished(directory):
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    log, started = directory.with_suffix(".log"), time.monotonic()
    variables = {**os.environ, **(environment or {})}
    print(f"{directory}: training; its output is in {log}", flush=True)
    with log.open("w") as output:
        process = subprocess.Popen(words, env=variables, stdout=output, stderr=output)
        try:
            code = process.wait()
        except KeyboardInterrupt:  # which the child got, too
            print("stopping: waiting for the run to save (Ctrl-C again: stop now)", flush=True)
            try:
                process.wait()
            except KeyboardInterrupt:
                process.kill()
            sys.exit("stopped; run the same command to resume")
    if not has_finished(directory):
        last = (log.read_text(errors="replace").strip() or "no output").splitlines()[-1]
        sys.exit(f"{directory} ended with status {code}: {last}; {log} has all of its output")
    print(f"{directory}: {time.monotonic() - started:.0f} s", flush=True)


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
