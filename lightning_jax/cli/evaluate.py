"""`lightning-jax eval`: score a policy on tasks without training, and compare it task by task."""

import asyncio
import time
from contextlib import closing
from pathlib import Path

from rich.console import Console

from lightning_jax.cli.commands.without_training import Eval
from lightning_jax.cli.try_agent import run_agent
from lightning_jax.rollouts.results.compare_tasks import Rewards, compare_tasks
from lightning_jax.rollouts.results.failures import FailureWatch
from lightning_jax.rollouts.results.metrics import split_by
from lightning_jax.settings import ConfigError
from lightning_jax.studio.comparison_tables import comparison_table
from lightning_jax.studio.evaluation import (
    count_calls,
    evaluation_table,
    learning_notes,
    read_rewards,
    task_results,
    write_results,
)
from lightning_jax.studio.terminal import as_terminal
from lightning_jax.system.text import printable
from lightning_jax.traces.store import TemporaryStore
from lightning_jax.train.config import Config
from lightning_jax.train.loop.inference import PolicySource, open_runner
from lightning_jax.train.tasks.data import evenly_spaced, load_tasks
from lightning_jax.train.tasks.task_files import read_tasks
from lightning_jax.train.watch.report import failure_table
from lightning_jax.types import Task


def evaluate(config: Config, source: PolicySource, command: Eval) -> None:
    """Score the policy and print a table.

    Raises UserError if the settings, the tasks or the earlier results are unusable, or if the agent
    failed everywhere.
    """
    console, started = Console(highlight=False), time.monotonic()
    _check_save(command.save)
    label, source = source.label(config), source.with_fixed_path()
    save = command.save and command.save.absolute()
    before = read_rewards(command.compare) if command.compare else None
    tasks = select_tasks(config, command)
    how = "sampled as the agent asks" if source.server else "greedy"
    if command.sampled and source.server is None:
        how = "sampled as in training"
    repeats = f" x {command.repeats}" * (command.repeats > 1)
    what = f"{len(tasks)}{repeats} tasks ({command.tasks}), {how}"
    print(f"{label} on {what}", flush=True)
    with closing(TemporaryStore()) as store:
        phase, number = "sampled" if command.sampled else "eval", command.repeats
        opened = open_runner(config, source, store, tasks)
        rollouts, _ = asyncio.run(run_agent(opened, tasks, phase, 0, number))
        FailureWatch(store).observe(rollouts, "the evaluation")
        calls = count_calls(store, rollouts)
        of_rollouts = [task for task in tasks for _ in range(len(rollouts) // len(tasks))]
        parts = {"all": list(rollouts)} | split_by(config.eval.by, of_rollouts, rollouts)
        table = as_terminal(evaluation_table(parts, calls), console.width)
        console.print("", table, "", sep="\n")
        print(failure_table(store), *learning_notes(rollouts, calls), sep="\n")
    results = task_results(rollouts, calls)
    print(f"{time.monotonic() - started:.0f} s")
    if save is not None:
        write_results(save, results)
        print(f"saved in {command.save}")
    if before is not None:
        name, rewards = before
        after: Rewards = {result.id: result.rewards for result in results}
        title = f"compared with {printable(name)}"
        grid = comparison_table(compare_tasks(rewards, after), title)
        console.print("", as_terminal(grid, console.width), sep="\n")


def select_tasks(config: Config, command: Eval) -> list[Task]:
    """Return the tasks to run, evenly spaced. By default they are those that a run evaluates."""
    if command.tasks not in ("dev", "train"):
        tasks = read_tasks(Path(command.tasks))
        return evenly_spaced(tasks, command.limit or len(tasks))
    train_tasks, dev_tasks = load_tasks(config)
    tasks = dev_tasks if command.tasks == "dev" else train_tasks
    return evenly_spaced(tasks, command.limit or config.eval.num_tasks or len(tasks))


def _check_save(path: Path | None) -> None:
    """Raise ConfigError, before the work, for a file that could not be written or read again."""
    if path is None or (path.suffix == ".jsonl" and path.parent.is_dir()):
        return
    raise ConfigError.invalid(
        "--save",
        f"--save is {str(path)!r}; expected a name that ends in .jsonl in an existing directory.",
    )
