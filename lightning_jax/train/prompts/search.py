"""Searches for better prompts between the steps of a run.

What a search chose is kept in the run directory, so a resumed run uses the same prompts and repeats
no search.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_jax.rollouts.config import PromptSearchConfig
from lightning_jax.rollouts.rewards.chat import endpoint_of
from lightning_jax.rollouts.runner import Runner
from lightning_jax.settings.loading import import_optional
from lightning_jax.system.threads import run_in_thread
from lightning_jax.train.hook import Hook
from lightning_jax.train.prompts.choice import choose_tasks
from lightning_jax.train.prompts.chosen import present_prompts, read_chosen, write_chosen
from lightning_jax.train.prompts.gepa import PACKAGE, Search
from lightning_jax.types import Metrics, Task

log = logging.getLogger(__name__)

NUMBERS = (  # of `Chosen`, as metrics
    *("score_before", "score_after"),
    *("num_fresh_tasks", "fresh_before", "fresh_after", "p_value"),
)


def is_due(step: int, every: int, policy_steps: range) -> bool:
    """Return True if a search comes before `step`: every so many policy steps, from the first on.

    In a run without policy steps it comes at the end.
    """
    is_reached = step in policy_steps or (not policy_steps and step >= policy_steps.start)
    return every > 0 and is_reached and (step - policy_steps.start) % every == 0


def check_search(search: PromptSearchConfig, tasks: Sequence[Task]) -> None:
    """Raise UserError if the package, a key or tasks are missing that a search needs."""
    if search.every:
        import_optional("gepa", PACKAGE)
        _ = search.key  # raises if it is not set
        num_fresh = len(choose_tasks(tasks, search, 0).fresh)
        if num_fresh < search.num_fresh:
            log.warning(
                "%d training tasks are left for prompt_search.num_fresh=%d, so searches may miss "
                "small gains; add tasks",
                *(num_fresh, search.num_fresh),
            )


class PromptSearch(Hook):
    """Searches of one run. They change `runner.prompts`."""

    def __init__(
        self,
        search: PromptSearchConfig,
        runner: Runner,
        tasks: Sequence[Task],
        directory: Path,
        policy_steps: range,
        begin_phase: Callable[[str], None],
    ) -> None:
        """`directory` is that of the run. `begin_phase` is called when a search begins."""
        self._search, self._runner = search, runner
        self._tasks, self._directory = tasks, directory
        self._policy_steps, self._begin_phase = policy_steps, begin_phase
        self._chosen = read_chosen(directory)

    async def before_rollouts(self, step: int) -> Metrics:
        """Search for better prompts, use them, and return metrics, {} if no search is due.

        A search that failed keeps the present prompts.
        """
        if not is_due(step, self._search.every, self._policy_steps):
            return {}
        self._begin_phase(f"prompts {step}")
        earlier = [entry for entry in self._chosen if entry.step == step]
        if earlier:
            self._runner.prompts.update(present_prompts(self._runner.prompts, earlier))
            return {}
        started, names = time.monotonic(), sorted(self._runner.prompts)
        log.info("step %d: searching for better prompts (%s)", step, ", ".join(names))
        before = dict(self._runner.prompts)
        loop = asyncio.get_running_loop()
        endpoint = endpoint_of(self._search, self._runner.config, self._runner.gateway)
        running = Search(self._runner, self._search, endpoint, step, loop)
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
