"""One search for better prompts by GEPA (arXiv 2507.19457), which runs in a thread.

Its rollouts are those of the run's own agent, rewards and server, in the phase PROMPT, which
nothing trains on.
"""

import asyncio
import json
import logging
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, TypeVar

from lightning_jax.gateway.sessions.open_rollouts import derive_seed
from lightning_jax.rollouts.agents.outcome import DEADLINE_IN_QUEUE
from lightning_jax.rollouts.config import PROMPT, PromptSearchConfig
from lightning_jax.rollouts.results.compare_tasks import compare_tasks
from lightning_jax.rollouts.rewards.chat import ChatCounts, ChatFailed, Endpoint, ask
from lightning_jax.rollouts.rewards.components import attempt_of
from lightning_jax.rollouts.rewards.verdicts import transcript_text, without_middle
from lightning_jax.rollouts.runner import RolloutRequest, Runner, TooManyFailures, run_requests
from lightning_jax.settings.loading import import_optional
from lightning_jax.system.threads import run_in_thread
from lightning_jax.traces.rows import shorten_task
from lightning_jax.train.prompts.choice import choose_tasks, halves, one_sided_p, replaces
from lightning_jax.train.prompts.chosen import Chosen
from lightning_jax.types import Metrics, Rollout, Task

log = logging.getLogger(__name__)

T = TypeVar("T")

PACKAGE = "gepa>=0.1.4"
MAX_SHOWN = 2000  # characters of a task or a transcript that the proposing model reads
TOO_BAD = -1e9  # score of a proposal that cannot be used, so that it is never chosen


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
class Search:
    """One search: the adapter that GEPA calls from its thread."""

    runner: Runner
    settings: PromptSearchConfig
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
        search, gepa = self.settings, import_optional("gepa", PACKAGE)
        seed = derive_seed(self.runner.seed, "prompts", self.step)
        chosen_tasks = choose_tasks(tasks, search, seed)
        stored = await self.runner.store.in_order(
            self.runner.store.rollouts, phase=PROMPT, step=self.step
        )
        # Rollouts of a search that did not end had other prompts, so their ids are not used again.
        numbers = (int(rollout.group_id.rpartition("-")[2]) for rollout in stored)
        self.num_groups = max(numbers, default=-1) + 1

        def optimize() -> Any:
            return gepa.optimize(
                seed_candidate=before,
                trainset=chosen_tasks.train,
                valset=chosen_tasks.dev,
                adapter=self,
                reflection_lm=self._propose,
                reflection_minibatch_size=min(search.minibatch, len(chosen_tasks.train)),
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
        chosen = Chosen(self.step, before)
        if result is not None:
            scores = result.val_aggregate_scores
            self.num_candidates = len(scores)
            best = max(range(len(scores)), key=lambda index: (scores[index], -index))
            chosen = replace(chosen, score_before=scores[0], score_after=scores[0])
            if best and self.failure is None:
                won = replace(
                    chosen, prompts=dict(result.candidates[best]), score_after=scores[best]
                )
                chosen = await self._confirmed(chosen_tasks.fresh, chosen, won)
        if self.failure is not None:
            log.warning("step %d: the search for prompts ended early: %s", self.step, self.failure)
        return chosen

    async def _confirmed(self, fresh: Sequence[Task], before: Chosen, won: Chosen) -> Chosen:
        """Return the best prompts of the search, or the earlier ones unless fresh tasks agree."""
        rewards: tuple[dict[str, list[float]], dict[str, list[float]]] = ({}, {})
        compared, is_better = compare_tasks(*rewards), None
        for part in halves(fresh):
            if is_better is not None:
                break
            pairs = [(task, chosen.prompts) for chosen in (before, won) for task in part]
            try:
                rollouts = await self._rollouts(pairs)
                check_measured(rollouts)
            except TooManyFailures as error:
                self.failure = str(error)
                return before
            for place, ((task, _), rollout) in enumerate(zip(pairs, rollouts, strict=True)):
                rewards[place // len(part)][str(task["id"])] = [rollout.reward or 0.0]
            compared = compare_tasks(*rewards)
            is_better = replaces(compared, is_last=len(compared.changes) == len(fresh))
        means = [fmean(value for (value,) in values.values()) for values in rewards]
        return replace(
            won if is_better else before,
            num_fresh_tasks=len(compared.changes),
            fresh_before=means[0],
            fresh_after=means[1],
            p_value=one_sided_p(compared),
        )

    @property
    def _has_ended(self) -> bool:
        """True if GEPA should try nothing more. It goes on after errors of what it calls."""
        return self.failure is not None or self.error is not None or self.is_stopped

    # What GEPA calls, in its thread

    def evaluate(
        self, batch: list[Task], candidate: dict[str, str], capture_traces: bool = False
    ) -> _Evaluated:
        """Return the rewards of one rollout for each task with these prompts."""
        limit = self.settings.max_chars
        if not all(_is_usable(text, limit) for text in candidate.values()):
            self.num_refused += 1
            empty = [{"Feedback": "The prompt is empty, too long or no text."} for _ in batch]
            return _Evaluated([""] * len(batch), [TOO_BAD] * len(batch), empty)
        try:
            rollouts = self._wait(self._rollouts([(task, candidate) for task in batch]))
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
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        body: dict[str, object] = {
            "model": self.endpoint.model,
            "messages": messages,
            "temperature": self.settings.temperature,
            "max_tokens": self.settings.max_tokens,
            "seed": derive_seed(self.runner.seed, "proposal", self.step, self.counts.calls),
        }
        try:
            return self._wait(
                ask(self.endpoint, body, self.runner.config, self.counts, _check_text)
            )
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

    async def _rollouts(self, pairs: Sequence[tuple[Task, Mapping[str, str]]]) -> list[Rollout]:
        """Return one rollout for each task with its prompts."""
        first, self.num_groups = self.num_groups, self.num_groups + len(pairs)
        self.num_rollouts += len(pairs)
        requests = [
            RolloutRequest(task, PROMPT, self.step, number, 0, dict(prompts))
            for number, (task, prompts) in enumerate(pairs, first)
        ]
        return await run_requests(requests, self.runner)

    async def _records(
        self, batch: Sequence[Task], rollouts: Sequence[Rollout]
    ) -> list[dict[str, str]]:
        store = self.runner.store
        await store.wait_for_spans()
        decode = self.runner.gateway.engine.tokenizer.decode

        def read() -> list[dict[str, str]]:
            records = []
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
                records.append(
                    {
                        "Inputs": without_middle(json.dumps(fields, ensure_ascii=False), MAX_SHOWN),
                        "Generated Outputs": transcript_text(attempt.transcript, MAX_SHOWN),
                        "Feedback": without_middle("; ".join(feedback), MAX_SHOWN),
                    }
                )
            return records

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
