"""Search for better prompts between the steps of a run, by GEPA (arXiv 2507.19457).

GEPA runs in a thread. Its rollouts are those of the run's own agent, rewards and server, in the
phase PROMPT, which nothing trains on. What a search chose is kept in PROMPTS of the run directory,
so a resumed run uses the same prompts and repeats no search.
"""

import asyncio
import json
import logging
import random
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from lightning_jax.gateway.sessions import derive_seed
from lightning_jax.rollouts.chat import ChatCounts, ChatFailed, Endpoint, ask, endpoint_of
from lightning_jax.rollouts.config import PROMPT, PromptSearchConfig, key_of
from lightning_jax.rollouts.outcome import DEADLINE_IN_QUEUE
from lightning_jax.rollouts.rewards import attempt_of
from lightning_jax.rollouts.runner import RolloutRequest, Runner, TooManyFailures, run_requests
from lightning_jax.rollouts.verdicts import transcript_text, without_middle
from lightning_jax.settings import ConfigError
from lightning_jax.system.files import write_whole
from lightning_jax.system.packages import import_optional
from lightning_jax.system.threads import run_in_thread
from lightning_jax.traces.tasks import shorten_task
from lightning_jax.train.config import Config
from lightning_jax.train.directory import PROMPTS
from lightning_jax.train.resume import first_discarded
from lightning_jax.types import Metrics, Rollout, Task

log = logging.getLogger(__name__)

T = TypeVar("T")

PACKAGE = "gepa>=0.1.4"
MAX_SHOWN = 2000  # characters of a task or a transcript that the proposing model reads
TOO_BAD = -1e9  # score of a proposal that cannot be used, so that it is never chosen


@dataclass(frozen=True)
class Chosen:
    """Prompts that a search chose, and their mean reward on its dev tasks before and after."""

    step: int
    prompts: Mapping[str, str]
    score_before: float | None = None  # None: the search did not get that far
    score_after: float | None = None


def read_chosen(directory: Path) -> list[Chosen]:
    """Return what the searches of a run chose, by step."""
    try:
        found = yaml.safe_load((directory / PROMPTS).read_text()) or []
    except FileNotFoundError:
        return []
    return [Chosen(**entry) for entry in found]


def write_chosen(directory: Path, chosen: Sequence[Chosen]) -> None:
    """Save what the searches of a run chose."""
    text = yaml.safe_dump([asdict(entry) for entry in chosen], sort_keys=False, allow_unicode=True)
    write_whole(directory / PROMPTS, text)


def forget_chosen(directory: Path, changed: Sequence[str], step: int) -> None:
    """Delete what searches chose for steps and prompts of another run.

    `changed` are the settings and sources that changed before the run resumes at `step`. Steps
    whose stored rollouts are discarded are searched again. A prompt with a new text in the settings
    begins with that text.
    """
    names = {key.removeprefix("prompts.") for key in changed if key.startswith("prompts.")}
    first, found = first_discarded(changed, step), read_chosen(directory)
    kept = [
        replace(entry, prompts={k: text for k, text in entry.prompts.items() if k not in names})
        for entry in found
        if entry.step < first
    ]
    if changed and kept != found:
        write_chosen(directory, kept)


def present_prompts(
    prompts: Mapping[str, str], chosen: Sequence[Chosen], step: int | None = None
) -> dict[str, str]:
    """Return the prompts of the settings, with those chosen up to `step`, by default the last."""
    found = dict(prompts)
    for entry in chosen:
        if step is None or entry.step <= step:
            found |= {name: text for name, text in entry.prompts.items() if name in found}
    return found


def is_due(config: Config, step: int) -> bool:
    """Return True if a search comes before the policy step `step`.

    In a run without policy steps it comes at the end.
    """
    every, after_warmup = config.prompt_search.every, step - config.warmup.num_steps
    if not every or after_warmup < 0 or after_warmup % every:
        return False
    return step < config.total_steps or config.num_steps == 0


def choose_tasks(
    tasks: Sequence[Task], search: PromptSearchConfig, seed: int
) -> tuple[list[Task], list[Task]]:
    """Return (tasks whose rollouts are read, tasks that choose), without a common one.

    Raises ConfigError if there are too few.
    """
    wanted = search.num_train + search.num_dev
    if len(tasks) < wanted:
        raise ConfigError(
            f"a search for prompts needs {wanted} training tasks and there are {len(tasks)}; lower "
            "prompt_search.num_train and prompt_search.num_dev.",
            reason="too_few",
            key="prompt_search.num_dev",
        )
    drawn = random.Random(seed).sample(list(tasks), wanted)
    return drawn[: search.num_train], drawn[search.num_train :]


def check_measured(rollouts: Sequence[Rollout]) -> None:
    """Raise TooManyFailures if a rollout says nothing about its prompt.

    Its infrastructure failed, or its calls waited for the server until the deadline.
    """
    for rollout in rollouts:
        if rollout.reward is None or rollout.reason == DEADLINE_IN_QUEUE:
            raise TooManyFailures(
                f"{rollout.rollout_id} failed: {rollout.reason}: {rollout.detail}",
                reason="too_many_failures",
                key=rollout.rollout_id,
            )


def check_search(config: Config, tasks: Sequence[Task]) -> None:
    """Raise UserError if the package, a key or tasks are missing that a search needs."""
    if config.prompt_search.every:
        import_optional("gepa", PACKAGE)
        key_of(config.prompt_search)
        choose_tasks(tasks, config.prompt_search, 0)


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
        running = _Search(self._runner, self._config, self._endpoint, step, loop)
        chosen = await running.run(self._tasks, before)
        self._runner.prompts.update(chosen.prompts)
        self._chosen = [entry for entry in self._chosen if entry.step != step] + [chosen]
        await run_in_thread(write_chosen, self._directory, self._chosen)
        metrics = running.metrics | {
            "prompts/changed": float(chosen.prompts != before),
            "prompts/search_s": time.monotonic() - started,
        }
        for name in ("score_before", "score_after"):
            if (score := getattr(chosen, name)) is not None:
                metrics[f"prompts/{name}"] = score
        log.info(
            "step %d: prompts %s; reward on the search's dev tasks: %s before, %s now",
            *(step, "changed" if chosen.prompts != before else "stay"),
            *(chosen.score_before, chosen.score_after),
        )
        return metrics


class _Stopped(Exception):
    """End of a search because its run stops."""


@dataclass
class _Evaluated:
    """Scores of one prompt on a batch, as GEPA reads them."""

    outputs: list[str]
    scores: list[float]
    trajectories: list[dict[str, str]] | None = None
    objective_scores: None = None
    num_metric_calls: int | None = None


@dataclass
class _Search:
    """One search: the adapter that GEPA calls from its thread."""

    runner: Runner
    config: Config
    endpoint: Endpoint  # of the model that proposes
    step: int
    loop: asyncio.AbstractEventLoop
    counts: ChatCounts = field(default_factory=ChatCounts)
    num_rollouts: int = 0
    num_groups: int = 0  # of stored rollouts with this step
    num_candidates: int = 0
    num_refused: int = 0
    failure: str | None = None
    error: Exception | None = None  # of the run, which a search cannot outlive
    is_stopped: bool = False
    propose_new_texts: None = None  # GEPA asks the proposing model itself

    @property
    def metrics(self) -> Metrics:
        return {
            "prompts/num_rollouts": float(self.num_rollouts),
            "prompts/num_candidates": float(self.num_candidates),
            "prompts/num_refused": float(self.num_refused),
            "prompts/failed": float(self.failure is not None),
            "prompts/calls": float(self.counts.calls),
            "prompts/failed_calls": float(self.counts.failed_calls),
            "prompts/tokens": float(self.counts.tokens),
        }

    async def run(self, tasks: Sequence[Task], before: dict[str, str]) -> Chosen:
        """Return what the search chose. If cancelled, end its rollouts first."""
        search, gepa = self.config.prompt_search, import_optional("gepa", PACKAGE)
        seed = derive_seed(self.config.seed, "prompts", self.step)
        train, dev = choose_tasks(tasks, search, seed)
        stored = await self.runner.store.in_order(
            self.runner.store.rollouts, phase=PROMPT, step=self.step
        )
        # Rollouts of a search that did not end had other prompts, so their ids are not used again.
        numbers = (int(rollout.group_id.rpartition("-")[2]) for rollout in stored)
        self.num_groups = max(numbers, default=-1) + 1

        def optimize() -> Any:
            return gepa.optimize(
                seed_candidate=before,
                trainset=train,
                valset=dev,
                adapter=self,
                reflection_lm=self._propose,
                reflection_minibatch_size=min(search.minibatch, len(train)),
                max_metric_calls=search.max_rollouts,
                stop_callbacks=[lambda _: self._has_ended],
                logger=_Quiet(),
                raise_on_exception=False,
                track_best_outputs=False,
                seed=seed,
            )

        working = asyncio.create_task(run_in_thread(optimize))
        try:
            result = await asyncio.shield(working)
        except asyncio.CancelledError:
            self.is_stopped = True
            await asyncio.wait({working})
            raise
        except (ChatFailed, TooManyFailures) as error:
            self.failure, result = str(error), None
        if self.error is not None:
            raise self.error
        if self.failure is not None:
            log.warning("step %d: the search for prompts ended early: %s", self.step, self.failure)
        if result is None:
            return Chosen(self.step, before)
        scores = result.val_aggregate_scores
        self.num_candidates = len(scores)
        best = max(range(len(scores)), key=lambda index: (scores[index], -index))
        return Chosen(self.step, dict(result.candidates[best]), scores[0], scores[best])

    @property
    def _has_ended(self) -> bool:
        """True if GEPA should try nothing more. It goes on after errors of what it calls."""
        return self.failure is not None or self.error is not None or self.is_stopped

    # What GEPA calls, in its thread

    def evaluate(
        self, batch: list[Task], candidate: dict[str, str], capture_traces: bool = False
    ) -> _Evaluated:
        """Return the rewards of one rollout for each task with these prompts."""
        limit = self.config.prompt_search.max_chars
        if not all(_is_usable(text, limit) for text in candidate.values()):
            self.num_refused += 1
            empty = [{"Feedback": "The prompt is empty, too long or no text."} for _ in batch]
            return _Evaluated([""] * len(batch), [TOO_BAD] * len(batch), empty)
        try:
            rollouts = self._wait(self._rollouts(batch, candidate))
            check_measured(rollouts)
            records = self._wait(self._records(batch, rollouts)) if capture_traces else None
        except (ChatFailed, TooManyFailures) as error:
            self.failure = str(error)
            raise
        except Exception as error:  # such as a full disk
            self.error = error
            raise
        scores = [rollout.reward or 0.0 for rollout in rollouts]
        return _Evaluated([rollout.rollout_id for rollout in rollouts], scores, records)

    def make_reflective_dataset(
        self, candidate: dict[str, str], eval_batch: _Evaluated, components_to_update: list[str]
    ) -> dict[str, list[dict[str, str]]]:
        """Return what the proposing model reads: tasks, transcripts and what they earned."""
        return {name: eval_batch.trajectories or [] for name in components_to_update}

    def _propose(self, prompt: str | list[dict[str, Any]]) -> str:
        """Return the answer of the proposing model."""
        search = self.config.prompt_search
        given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        body: dict[str, object] = {
            "model": self.endpoint.model,
            "messages": given,
            "temperature": search.temperature,
            "max_tokens": search.max_tokens,
            "seed": derive_seed(self.config.seed, "proposal", self.step, self.counts.calls),
        }
        limits = self.config.rollout
        try:
            return self._wait(ask(self.endpoint, body, limits, self.counts, _check_text))
        except ChatFailed as error:
            self.failure = str(error)
            raise

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the result of work on the run's event loop. Raises _Stopped if the run stops."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        while True:
            try:
                return future.result(timeout=0.2)
            except TimeoutError:
                if future.done():
                    raise
                if self.is_stopped:
                    future.cancel()
                    raise _Stopped from None

    # On the event loop

    async def _rollouts(self, batch: Sequence[Task], prompts: Mapping[str, str]) -> list[Rollout]:
        first, self.num_groups = self.num_groups, self.num_groups + len(batch)
        self.num_rollouts += len(batch)
        requests = [
            RolloutRequest(task, PROMPT, self.step, number, 0, dict(prompts))
            for number, task in enumerate(batch, first)
        ]
        return await run_requests(requests, self.runner)

    async def _records(
        self, batch: Sequence[Task], rollouts: Sequence[Rollout]
    ) -> list[dict[str, str]]:
        store = self.runner.store
        await store.wait_for_spans()
        decode = self.runner.gateway.engine.tokenizer.decode

        def read() -> list[dict[str, str]]:
            found = []
            for task, rollout in zip(batch, rollouts, strict=True):
                attempt = attempt_of(rollout, store.spans(rollout.rollout_id), decode)
                fields = shorten_task({k: value for k, value in task.items() if k != "id"})
                reasons = store.reasons(rollout.rollout_id)
                feedback = [
                    f"reward {rollout.reward:g}",
                    *(f"{name} {value:g}" for name, value in rollout.components.items()),
                    *reasons.values(),
                    *([rollout.detail] if rollout.detail else []),
                ]
                found.append(
                    {
                        "Inputs": without_middle(json.dumps(fields, ensure_ascii=False), MAX_SHOWN),
                        "Generated Outputs": transcript_text(attempt.transcript, MAX_SHOWN),
                        "Feedback": without_middle("; ".join(feedback), MAX_SHOWN),
                    }
                )
            return found

        return await run_in_thread(read)


class _Quiet:
    """Logger that GEPA takes: its lines are details."""

    def log(self, message: str) -> None:
        log.debug("%s", message)


def _is_usable(text: str, max_chars: int) -> bool:
    """Return True if an agent can be given the text: some characters, not too many, all UTF-8."""
    is_utf8 = text == text.encode(errors="replace").decode()
    return bool(text.strip()) and len(text) <= max_chars and is_utf8


def _check_text(text: str) -> None:
    if not text.strip():
        raise ValueError("it is empty")
