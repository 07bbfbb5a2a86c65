"""Training loop: collect rollouts, assign credit, batch, update, publish the weights, evaluate.

`train` runs it from the current state of a run directory to `config.total_steps`.
docs/concepts/loop.md lists the files of a run directory.

Version s of the weights is the result of s trainer steps. A step makes one optimizer update, or
more if `algorithm.num_epochs` and `num_minibatches` say so. After a crash the loop resumes from the
newest checkpoint; a run that is stopped writes one. The rollouts of repeated steps come from the
store and are not sampled twice.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from lightning_jax.rollouts.agents.functions import AgentFunction
from lightning_jax.rollouts.config import RolloutConfig
from lightning_jax.rollouts.results.failures import BrokenAgent
from lightning_jax.rollouts.runner import TooManyFailures
from lightning_jax.settings import ConfigError
from lightning_jax.system.descriptors import limit_of_files, number_free
from lightning_jax.system.threads import run_in_thread
from lightning_jax.traces.convert import COLDEST
from lightning_jax.train.config import Config, EvalConfig
from lightning_jax.train.loop.hooks import HookError
from lightning_jax.train.loop.rescored import rescore
from lightning_jax.train.loop.run import Run
from lightning_jax.train.loop.startup import MakePage, load_trainable, open_run, with_dtypes
from lightning_jax.train.memory.plan import with_remat
from lightning_jax.train.state import multihost
from lightning_jax.train.state.checkpoint import CheckpointError
from lightning_jax.train.state.replica import Replica
from lightning_jax.train.tasks.stored import read_stored
from lightning_jax.train.watch.progress import show_progress
from lightning_jax.types import Task

log = logging.getLogger(__name__)

# Descriptors that this process needs per agent: both ends of a few connections, or the pipes of a
# program and one end, and an event loop.
FILES_PER_AGENT = 8


async def train(
    config: Config,
    train_tasks: Sequence[Task],
    dev_tasks: Sequence[Task],
    *,
    agent: AgentFunction | None = None,
    make_page: MakePage | None = None,
) -> list[dict[str, float | int]]:
    """Run or resume a run to its end and return the rows of its metrics file.

    If `config.learn` names a run, learn from its stored attempts.
    `agent` is a function (task, llm) that returns the reward, by default the one that `config`
    names. `make_page` makes a page for people that the run's server shows. In a run of several
    processes all of them call this, and only process 0 returns rows.
    """
    multihost.join(config.distributed)
    if not multihost.is_leader():
        await _follow(with_dtypes(config))
        return []
    _check_files(config.rollout, config.eval)
    if config.num_steps:
        _warn_of_bias(config.rollout)
    stored = None
    if config.learn.run is not None:
        learn = config.learn
        rescored = await rescore(learn, config.rewards) if learn.rescored else None
        config, stored = await asyncio.to_thread(read_stored, config, rescored)
    opened = open_run(
        config, train_tasks, dev_tasks, agent=agent, make_page=make_page, stored=stored
    )
    async with multihost.cancel_on_stop(), opened as run:
        with (
            logging_redirect_tqdm(),
            tqdm(
                total=config.total_steps,
                initial=run.step,
                desc="steps",
                unit="step",
                disable=None,  # without a terminal, the log lines are enough
            ) as bar,
        ):
            async with show_progress(run.progress, bar):
                await _save_at_end(run, _run_steps(run, config.total_steps, bar))
        await run_in_thread(run.export)
    return run.metrics.rows


async def _run_steps(run: Run, total_steps: int, bar: tqdm) -> None:
    try:
        while run.step < total_steps:
            await run.one_step()
            bar.update(run.step - bar.n)  # a warm-up that ends early skips steps
    finally:
        await run.collector.groups.close()
    await run.last_evaluation()


async def _save_at_end(run: Run, steps: Coroutine[Any, Any, None]) -> None:
    """Run the steps, and save the last one.

    Also save if the run is stopped, while its agents end, or if its rollouts fail too often or a
    hook of the settings fails.
    """
    running = asyncio.create_task(steps)
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        log.info("stopping: finishing an update if one runs, then saving (Ctrl-C again: stop now)")
        running.cancel()
        if run.step == 0:  # there is nothing to save unless the first update is running
            await asyncio.wait({running})
        try:
            await _save_progress(run)
        finally:
            await asyncio.wait({running})
        if not running.cancelled():
            running.result()
        raise
    except (BrokenAgent, TooManyFailures, HookError):
        await _save_progress(run)
        raise
    if run.config.total_steps:  # else there are no moments, which a longer run would miss
        await run.save()


async def _save_progress(run: Run) -> None:
    """Save the last finished step of a run that ends early, if it has one."""
    if run.step == 0:
        return
    try:
        if await run.save():
            log.info("saved step %d", run.step)
    except CheckpointError as error:  # the run has another reason to end
        log.warning("%s", error)


async def _follow(config: Config) -> None:
    """Do the share of a process other than 0 in every update and checkpoint.

    If cancelled, ask process 0 to end the run, and return when it does.
    """

    def work() -> None:
        model = load_trainable(config)
        replica = Replica(with_remat(config, multihost.agree_on_remat()), model)
        try:
            multihost.follow(replica)
        finally:
            replica.close()

    working = asyncio.create_task(asyncio.to_thread(work))
    try:
        await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.to_thread(multihost.ask_to_stop)
        await asyncio.wait({working})
        raise


def _warn_of_bias(rollout: RolloutConfig) -> None:
    """Warn if rollouts are sampled from another distribution than the trained one.

    Gradients are those of the unfiltered policy at a call's temperature. Other samples bias them.
    """
    exact = {
        "temperature": rollout.temperature is not None and rollout.temperature >= COLDEST,
        "top_p": rollout.top_p == 1.0,
        "top_k": rollout.top_k == 0,
    }
    named = [f"rollout.{name}" for name, is_exact in exact.items() if not is_exact]
    if named:
        log.warning(
            "%s: rollouts may be sampled from a different distribution than the trained policy, "
            "which biases gradients; set a temperature of %s or more, top_p 1 and top_k 0 (see "
            "docs/algorithms.md)",
            ", ".join(named),
            COLDEST,
            extra={"event": "biased_sampling", "settings": named},
        )


def _check_files(rollout: RolloutConfig, evaluation: EvalConfig) -> None:
    """Raise the limit of open files. Raises ConfigError if the agents need more."""
    free = number_free()
    in_a_step = max(
        rollout.tasks_per_step * rollout.group_size,
        evaluation.num_tasks * max(1, evaluation.attempts),
    )
    num_agents = min(rollout.concurrency, in_a_step)
    if num_agents * FILES_PER_AGENT > free:
        raise ConfigError.conflict(
            "rollout.concurrency",
            f"{num_agents} concurrent agents need about {num_agents * FILES_PER_AGENT} open files, "
            f"but only {max(free, 0)} of {limit_of_files()} are free; set "
            f"rollout.concurrency={max(free // FILES_PER_AGENT, 1)}, or raise the hard limit "
            "(ulimit -Hn).",
        )
