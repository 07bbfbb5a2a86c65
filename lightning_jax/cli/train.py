"""A training run from the command line, and the report at its end."""

import asyncio
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NoReturn

from lightning_jax.cli.runtime import lack_of_memory, run_until_stopped
from lightning_jax.errors import UserError
from lightning_jax.studio.live.server import page_of
from lightning_jax.system.text import printable, with_marked_lines
from lightning_jax.traces.store import Store
from lightning_jax.train.config import Config
from lightning_jax.train.directory import STORE
from lightning_jax.train.loop.trainer import train
from lightning_jax.train.state.multihost import is_follower, is_leader
from lightning_jax.train.watch.findings import TROUBLESHOOTING
from lightning_jax.train.watch.report import (
    NOTHING_TRAINED,
    checkpoint_line,
    failure_table,
    is_untrained,
    learning_table,
    result_table,
)
from lightning_jax.types import Task


def train_and_report(
    config: Config,
    train_tasks: Sequence[Task],
    dev_tasks: Sequence[Task],
    *,
    has_page: bool = False,
    label: Path | None = None,
) -> int:
    """Train to the end, resuming if the run has begun, and print the evaluations.

    With `has_page` the run's server shows the live page. `label` is the run directory as the user
    wrote it, by default that of the settings.
    Return the exit code: 1 if no step with rollouts changed the weights, else 0.
    """
    directory = Path(config.run_dir).absolute()
    label = label or Path(config.run_dir)
    print(f"run directory: {label}", flush=True)
    try:
        make_page = page_of if has_page else None
        rows = run_until_stopped(train(config, train_tasks, dev_tasks, make_page=make_page))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    except Exception as error:
        if is_follower():
            _end_at_once(error)
        raise
    if not is_leader():
        return 0
    print("\n" + printable(result_table(rows, config.eval.by)))
    if learned := learning_table(rows):
        print("\n" + learned)
    with closing(Store(directory / STORE)) as store:
        print("\n" + failure_table(store))
    print("\n" + checkpoint_line(directory, config.checkpoint.keep, label))
    policy, run = shlex.quote(str(label / "policy")), shlex.quote(str(label))
    print(f"curves: {label / 'curves.png'}   policy: {label / 'policy'}")
    print(f"next: lightning-jax view {run}       # every rollout; `runs` lists all runs")
    if is_untrained(rows):
        print(f"error: {NOTHING_TRAINED}; {TROUBLESHOOTING}", file=sys.stderr)
        return 1
    print(f"      lightning-jax compare {run} RUN  # with another run, task by task")
    if not config.policies:
        print(f"      lightning-jax eval --run {run}   # on other tasks: --tasks FILE")
        print(f"      lightning-jax serve --model {policy}")
    return 0


def _end_at_once(error: Exception) -> NoReturn:
    """Show the error and end the process, without JAX's wait for the others.

    Process 0 would wait for this one, too. Now it finds that this one is lost.
    """
    sentence = str(error) if isinstance(error, UserError) else lack_of_memory(error)
    if sentence is not None:
        print(with_marked_lines(f"error: {sentence}"), file=sys.stderr)
    else:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
