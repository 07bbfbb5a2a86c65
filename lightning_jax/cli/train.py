"""Shared parts of the scripts in experiments/: startup, splits and the report of a run.

A script's `main` takes the settings, does its own setup (such as a server for all rollouts) and
ends with `train_and_report`. `run_main` calls it.
"""

import argparse
import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from lightning_jax.cli.runtime import (
    STOPPED,
    add_settings,
    is_unwritable,
    keep_compiled,
    log_plainly,
    parse,
    stop_on_sigterm,
)
from lightning_jax.errors import UserError
from lightning_jax.settings import load_config
from lightning_jax.traces.store import Store
from lightning_jax.train.config import Config, DataConfig
from lightning_jax.train.multihost import is_leader
from lightning_jax.train.report import failure_table, result_table
from lightning_jax.train.trainer import train
from lightning_jax.types import Task

# (data.root, "train" or "dev", settings, cache directory) -> tasks, and the number left out per
# reason.
LoadTasks = Callable[[str | None, str, DataConfig, Path], tuple[list[Task], dict[str, int]]]


def run_main(
    main: Callable[[Config], None], doc: str | None, argv: Sequence[str] | None = None
) -> None:
    """Call `main` with the settings from the command line.

    The first line of `doc`, the script's docstring, becomes the help text. A user error, Ctrl-C or
    SIGTERM exits with one sentence.
    """
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    add_settings(parser)
    arguments = parse(parser, argv)
    log_plainly()
    stop_on_sigterm()
    keep_compiled()
    try:
        main(load_config(Config, [arguments.config, *arguments.settings]))
    except UserError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        if not is_unwritable(error):
            raise
        sys.exit(
            f"error: {error}; free disk space or fix permissions, then run the same command to "
            "resume"
        )
    except KeyboardInterrupt:
        sys.exit(STOPPED)


def cache_dir(config: Config) -> Path:
    """Return the directory for unpacked or generated data sets, shared by neighboring runs."""
    return Path(config.run_dir).parent / "data"


def load_splits(config: Config, load: LoadTasks) -> tuple[list[Task], list[Task]]:
    """Return the train and dev tasks. Print their numbers and the numbers left out."""
    cache = cache_dir(config)
    train_tasks, left_out = load(config.data.root, "train", config.data, cache)
    dev_tasks, dev_left_out = load(config.data.root, "dev", config.data, cache)
    num_train = _task_count(train_tasks, "train", left_out)
    print(f"{num_train}, {_task_count(dev_tasks, 'dev', dev_left_out)}")
    return train_tasks, dev_tasks


def _task_count(tasks: Sequence[Task], split: str, left_out: Mapping[str, int]) -> str:
    reasons = ", ".join(f"{number} {reason}" for reason, number in left_out.items())
    return f"{len(tasks)} {split} tasks" + (f" (left out: {reasons})" if reasons else "")


def train_and_report(
    config: Config, train_tasks: Sequence[Task], dev_tasks: Sequence[Task]
) -> None:
    """Train to the end, resuming if the run has begun, and print the evaluations."""
    directory = Path(config.run_dir)
    print(f"run directory: {directory}", flush=True)
    rows = asyncio.run(train(config, train_tasks, dev_tasks))
    if not is_leader():
        return
    print("\n" + result_table(rows, config.eval.by))
    with closing(Store(directory / "store.sqlite")) as store:
        print("\n" + failure_table(store))
    print(f"\ncurves: {directory / 'curves.png'}   policy: {directory / 'policy'}")
