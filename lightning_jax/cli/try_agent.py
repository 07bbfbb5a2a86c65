"""`lightning-jax try`: run an agent on one task and show its rollouts as `view` does."""

import asyncio
import difflib
import json
import shlex
import statistics
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, closing
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.rule import Rule

from lightning_jax.cli.commands.without_training import Try
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.rollouts.runner import Runner
from lightning_jax.settings import ConfigError, save_config
from lightning_jax.studio.evaluation import count_calls, learning_notes
from lightning_jax.studio.load import RunReader, recorded_settings
from lightning_jax.studio.needs import need_lines, needed_settings, usage_of
from lightning_jax.studio.records import cut
from lightning_jax.studio.terminal import render_rollout, render_run
from lightning_jax.system.text import printable
from lightning_jax.traces.store import Store, TemporaryStore
from lightning_jax.train.config import Config
from lightning_jax.train.loop.inference import PolicySource, open_runner, run_tasks
from lightning_jax.train.tasks.data import load_tasks
from lightning_jax.types import Rollout, Task

MAX_TASK_CHARS = 400


def try_agent(config: Config, source: PolicySource, command: Try) -> int:
    """Run the agent on one task and print each rollout. Return 0 if all attempts are scored.

    The rollouts are kept only with `--record`. Raises UserError if the settings, the task or the
    policy are unusable.
    """
    console = Console(highlight=False)
    # A failure is what the user wants to see, at once.
    rollout = replace(config.rollout, max_attempts=1, max_infrastructure_failures=1.0)
    agent = replace(config.agent, workers=0, remote_workers=False)  # starts sooner
    config = replace(config, rollout=rollout, agent=agent)
    label, source = source.label(config), source.with_fixed_path()
    path = command.record and command.record.absolute()
    task = find_task(*load_tasks(config), command.task)
    agent = " ".join(config.agent.command or [str(config.agent.function)])
    text = cut(printable(json.dumps(task, ensure_ascii=False, default=str)), MAX_TASK_CHARS)
    print(f"{agent} on task {printable(task['id'])} with {label}: {text}", flush=True)
    with closing(TemporaryStore() if path is None else Store(path)) as store:
        phase, number = "eval" if command.greedy else "train", command.num_attempts
        step = store.next_step(phase)
        opened = open_runner(config, source, store, [task])
        rollouts, tokenizer = asyncio.run(run_agent(opened, [task], phase, step, number))
        reader = RunReader(
            Path(store.path), store, config=config, tokenizer=tokenizer, has_credit=number > 1
        )
        for index, done in enumerate(rollouts):
            if index:
                console.print(Rule(style="dim"))
            view = reader.rollout(done.rollout_id)
            console.print(render_rollout(view, console.width, command.chars))
        if number > 1:
            console.print(Rule(style="dim"))
            view = reader.run(phase=phase, step=step, limit=number)
            console.print(render_run(view, console.width))
        pairs = [(done, store.spans(done.rollout_id)) for done in rollouts]
        is_remote = source.server is not None
        usage = usage_of(pairs, config.rollout, config.serve, is_remote_policy=is_remote)
        needed = needed_settings(usage, config.rollout, config.serve, config.batch)
        for line in _summary(store, rollouts, command.greedy) + need_lines(usage, needed):
            print(line)
    if path is not None:
        save_config(config, recorded_settings(path))
        quoted = shlex.quote(str(command.record))
        print(f"recorded; show it again with: lightning-jax view {quoted} ROLLOUT")
    return 0 if all(done.status == "scored" for done in rollouts) else 1


def find_task(train_tasks: Sequence[Task], dev_tasks: Sequence[Task], name: str | None) -> Task:
    """Return the task with that id, or else at that position of the training tasks.

    By default return the first. Raises ConfigError if there is none.
    """
    if name is None:
        return train_tasks[0]
    by_id = {task["id"]: task for task in (*dev_tasks, *train_tasks)}
    if name in by_id:
        return by_id[name]
    if name.isdecimal() and int(name) < len(train_tasks):
        return train_tasks[int(name)]
    close = difflib.get_close_matches(name, by_id, n=3, cutoff=0.5)
    hint = f"the closest are {', '.join(close)}" if close else f"such as {train_tasks[0]['id']}"
    raise ConfigError.unknown(
        "--task",
        f"no task has the id {name!r}; pass an id ({hint}), or a position below "
        f"{len(train_tasks)}.",
    )


async def run_agent(
    opened: AbstractAsyncContextManager[Runner],
    tasks: Sequence[Task],
    phase: str,
    step: int,
    number: int,
) -> tuple[list[Rollout], Tokenizer]:
    """Return `number` rollouts of each task, and the tokenizer of who answered their calls."""
    async with opened as runner:
        rollouts = await run_tasks(runner, tasks, phase, step, number)
        return rollouts, runner.gateway.engine.tokenizer


def _summary(store: Store, rollouts: Sequence[Rollout], is_greedy: bool) -> list[str]:
    """Return the spread of the rewards, and what would keep training from learning."""
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    lines = []
    if len(rewards) > 1:
        spread = statistics.stdev(rewards)
        lines.append(f"reward {statistics.fmean(rewards):.3f}, standard deviation {spread:.3f}")
    are_equal = len(rewards) > 1 and len(set(rewards)) == 1 and not is_greedy
    calls = count_calls(store, rollouts)
    return lines + learning_notes(rollouts, calls, has_equal_rewards=are_equal)
