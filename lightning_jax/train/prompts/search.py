"""Searches for better prompts between the steps of a run.

What a search chose is kept in the run directory, so a resumed run uses the same prompts and repeats
no search.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from lightning_jax.rollouts.rewards.chat import endpoint_of
from lightning_jax.rollouts.runner import Runner
from lightning_jax.settings.loading import import_optional
from lightning_jax.system.threads import run_in_thread
from lightning_jax.train.config import Config
from lightning_jax.train.prompts.choice import choose_tasks
from lightning_jax.train.prompts.chosen import present_prompts, read_chosen, write_chosen
from lightning_jax.train.prompts.gepa import PACKAGE, Search
from lightning_jax.types import Metrics, Task

log = logging.getLogger(__name__)

NUMBERS = (  # of `Chosen`, as metrics
    *("score_before", "score_after"),
    *("num_fresh_tasks", "fresh_before", "fresh_after", "p_value"),
)


def is_due(config: Config, step: int) -> bool:
    """Return True if a search comes before the policy step `step`.

    In a run without policy steps it comes at the end.
    """
    every, after_warmup = config.prompt_search.every, step - config.warmup.num_steps
    if not every or after_warmup < 0 or after_warmup % every:
        return False
    return step < config.total_steps or config.num_steps == 0


def check_search(config: Config, tasks: Sequence[Task]) -> None:
    """Raise UserError if the package, a key or tasks are missing that a search needs."""
    if config.prompt_search.every:
        import_optional("gepa", PACKAGE)
        _ = config.prompt_search.key  # raises if it is not set
        found = choose_tasks(tasks, config.prompt_search, 0)
        if (number := len(found.fresh)) < config.prompt_search.num_fresh:
            log.warning(
                "%d training tasks are left for prompt_search.num_fresh=%d, so searches may miss "
                "small gains; add tasks",
                *(number, config.prompt_search.num_fresh),
            )


class PromptSearch:
    """Searches of one run. They change `runner.prompts`."""

    def __init__(
        self, config: Config, runner: Runner, tasks: Sequence[Task], step: int = 0
    ) -> None:
        """Take over what earlier searches chose up to `step`."""
        self._config, self._runner = config, runner
        self._tasks, self._directory = tasks, Path(config.run_dir)
        self._chosen = read_chosen(self._directory)
        runner.prompts.update(present_prompts(config.prompts, self._chosen, step))
        if config.prompt_search.every:
            self._endpoint = endpoint_of(config.prompt_search, config.rollout, runner.gateway)

    async def search_if_due(self, step: int) -> Metrics:
        """Search for better prompts before `step`, use them, and return metrics, {} if none is due.

        A search that failed keeps the present prompts.
        """
        if not is_due(self._config, step):
            return {}
        known = [entry for entry in self._chosen if entry.step == step]
        if known:
            self._runner.prompts.update(present_prompts(self._runner.prompts, known))
            return {}
        started, names = time.monotonic(), sorted(self._runner.prompts)
        log.info("step %d: searching for better prompts (%s)", step, ", ".join(names))
        before = dict(self._runner.prompts)
        loop = asyncio.get_running_loop()
        running = Search(self._runner, self._config, self._endpoint, step, loop)
        chosen = await running.run(self._tasks, before)
        self._runner.prompts.update(chosen.prompts)
        self._chosen = [entry for entry in self._chosen if entry.step != step] + [chosen]
        await run_in_thread(write_chosen, self._directory, self._chosen)
        metrics = running.metrics | {
            "prompts/changed": float(chosen.prompts != before),
            "prompts/search_s": time.monotonic() - started,
        }
        for name in NUMBERS:
            if (number := getattr(chosen, name)) is not None:
                metrics[f"prompts/{name}"] = float(number)
        log.info(
            "step %d: prompts %s; reward on the search's dev tasks: %s before, %s now; on %d fresh "
            "tasks: %s with the earlier prompts, %s with the best of the search",
            *(step, "changed" if chosen.prompts != before else "stay"),
            *(chosen.score_before, chosen.score_after, chosen.num_fresh_tasks or 0),
            *(chosen.fresh_before, chosen.fresh_after),
        )
        return metrics
