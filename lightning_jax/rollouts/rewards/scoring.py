"""Scoring of finished rollouts by the components of their reward."""

import asyncio
import json
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_jax.gateway.app import Gateway
from lightning_jax.rollouts.agents.functions import call_foreign
from lightning_jax.rollouts.agents.outcome import (
    Outcome,
    failure,
    finite,
    outcome_of_error,
    storable,
)
from lightning_jax.rollouts.config import AGENT, MEASURING, RewardConfig, RolloutConfig
from lightning_jax.rollouts.rewards.chat import ChatFailed, endpoint_of
from lightning_jax.rollouts.rewards.components import (
    Attempt,
    Decode,
    agent_reward,
    attempt_of,
    weighted_sum,
)
from lightning_jax.rollouts.rewards.judge import Judge
from lightning_jax.rollouts.rewards.verdicts import Judgement, verdict_digest
from lightning_jax.settings.loading import load_function
from lightning_jax.system.threads import run_in_thread
from lightning_jax.traces.store import Store
from lightning_jax.traces.trajectories import is_bounded
from lightning_jax.types import LLM, Metrics, Rollout, Task

log = logging.getLogger(__name__)

BAD_COMPONENT, JUDGE_FAILED = "bad_component", "judge_failed"
NO_GATEWAY = LLM("", "", "")  # components call no policy

Value = Judgement | Outcome  # of one attempt; an outcome is a failure
Ask = Callable[[str, Sequence[Attempt]], Awaitable[list[Judgement]]]  # of a judge


class RewardScorer:
    """Components of a run's reward. Values are recorded in the store.

    Failed attempts keep their reward and are shown to no component.
    """

    def __init__(
        self,
        rewards: Mapping[str, RewardConfig],
        judges: Mapping[str, Judge],
        store: Store,
        decode: Decode,
        limits: RolloutConfig,
    ) -> None:
        """`judges` are by component. Raises ConfigError if a function cannot be loaded."""
        self.rewards, self._judges, self._store = rewards, judges, store
        self._decode, self._limits = decode, limits
        self._functions = {
            name: function if callable(function) else load_function(function)
            for name, reward in rewards.items()
            if (function := reward.function or reward.group) is not None
        }
        self._failures: Counter[str] = Counter()

    @property
    def needs_agent_reward(self) -> bool:
        """True if a rollout whose agent returned no reward has failed."""
        return AGENT in self.rewards

    def take_metrics(self) -> Metrics:
        """Return the costs of the judges and the failures of components since the last call."""
        metrics = {f"reward/{name}_failed": float(n) for name, n in self._failures.items()}
        self._failures.clear()
        for name, judge in self._judges.items():
            metrics |= judge.take_counts().metrics(f"reward/{name}_")
        return metrics

    async def score(self, task: Task, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return the rollouts of a group with the sums of their components as rewards.

        A group that the store holds with its components stays as it is.
        """
        scored = [rollout for rollout in rollouts if rollout.status == "scored"]
        if all(rollout.components for rollout in scored):
            return list(rollouts)
        names = self.components(rollouts[0].phase)
        changed, reasons = await self.rescore(task, scored, names)
        await self._store.in_order(self._store.set_scores, changed, reasons)
        by_id = {rollout.rollout_id: rollout for rollout in changed}
        return [by_id.get(rollout.rollout_id, rollout) for rollout in rollouts]

    def components(self, phase: str) -> list[str]:
        """Return the components to compute in a phase, all but what the agent returned.

        Where a task has one attempt, those that compare attempts are left out.
        """
        has_one_attempt = phase in MEASURING
        return [
            name
            for name, reward in self.rewards.items()
            if name != AGENT and not (has_one_attempt and reward.needs_group)
        ]

    async def rescore(
        self, task: Task, scored: Sequence[Rollout], names: Sequence[str]
    ) -> tuple[list[Rollout], dict[str, dict[str, str]]]:
        """Return (scored rollouts with these components, reasons of judges), and record nothing.

        Reasons are by rollout id and component.
        """
        attempts = await self._attempts(scored)
        columns = await asyncio.gather(*(self._values(name, task, attempts) for name in names))
        rows = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
        rows = rows or [{} for _ in scored]
        changed, reasons = [], {}
        for rollout, row in zip(scored, rows, strict=True):
            changed.append(self._scored(rollout, row))
            texts = {name: v.reason for name, v in row.items() if isinstance(v, Judgement)}
            reasons[rollout.rollout_id] = {name: text for name, text in texts.items() if text}
        return changed, reasons

    async def _attempts(self, rollouts: Sequence[Rollout]) -> list[Attempt]:
        await self._store.wait_for_spans()

        def read() -> list[Attempt]:
            return [attempt_of(r, self._store.spans(r.rollout_id), self._decode) for r in rollouts]

        return await run_in_thread(read)

    def _scored(self, rollout: Rollout, row: Mapping[str, Value]) -> Rollout:
        """Return the rollout with its components, or failed if one with a weight failed."""
        components, limit = {AGENT: agent_reward(rollout)}, self._limits.max_abs_reward
        for name, value in row.items():
            if isinstance(value, Judgement):
                if is_bounded([value.value], limit):
                    components[name] = value.value
                    continue
                value = _over_limit(f"rewards.{name} returned", value.value)
            self._failures[name] += 1
            if self.rewards[name].weight_in(rollout.phase):
                return _failed(rollout, value)
            log.warning("%s: held-out reward %s: %s", rollout.rollout_id, name, value.detail)
        total = weighted_sum(components, self.rewards, rollout.phase)
        if not is_bounded([total], limit):
            return _failed(rollout, _over_limit("the reward is", total))
        return replace(rollout, reward=total, components=components)

    async def _values(self, name: str, task: Task, attempts: Sequence[Attempt]) -> list[Value]:
        """Return the component's value of each attempt."""
        reward = self.rewards[name]
        if not attempts:
            return []
        if reward.needs_group:
            if reward.group:
                return await self._by_group(name, task, attempts)
            return await self._by_judge(name, self._judges[name].compare, task, attempts)
        if reward.function:
            calls = (self._call(name, task, attempt) for attempt in attempts)
            results = await asyncio.gather(*calls)
            return [r if isinstance(r, Outcome) else _checked(name, r[0]) for r in results]
        alike: dict[str, list[Attempt]] = defaultdict(list)
        for attempt in attempts:
            alike[verdict_digest(attempt.transcript)].append(attempt)
        assess = self._judges[name].assess
        asking = (self._by_judge(name, assess, task, equal) for equal in alike.values())
        parts = await asyncio.gather(*asking)
        values = {
            attempt.rollout_id: value
            for some, part in zip(alike.values(), parts, strict=True)
            for attempt, value in zip(some, part, strict=True)
        }
        return [values[attempt.rollout_id] for attempt in attempts]

    async def _by_judge(
        self, name: str, ask: Ask, task: Task, attempts: Sequence[Attempt]
    ) -> list[Value]:
        """Return the values that a judge gives, or its failure for each."""
        fields = {name: value for name, value in task.items() if name != "id"}
        text = json.dumps(fields, ensure_ascii=False, default=repr)  # transcripts may lack it
        try:
            return list(await ask(text, attempts))
        except ChatFailed as error:
            detail = f"rewards.{name}: {error}"
            failed = Outcome("infrastructure_failure", None, JUDGE_FAILED, detail)
            return [failed] * len(attempts)

    async def _by_group(self, name: str, task: Task, attempts: Sequence[Attempt]) -> list[Value]:
        result = await self._call(name, task, list(attempts))
        if isinstance(result, Outcome):
            return [result] * len(attempts)
        try:
            values = list(result[0])
        except TypeError:
            values = []
        if len(values) != len(attempts):
            text = f"rewards.{name} returned {_words(result[0])}; expected {len(attempts)} numbers"
            return [failure(BAD_COMPONENT, text)] * len(attempts)
        return [_checked(name, value) for value in values]

    async def _call(self, name: str, task: Task, argument: Any) -> tuple[Any] | Outcome:
        """Return (result of the component's function), or the failure if it raised."""
        limit = self._limits.timeout_s
        try:
            async with asyncio.timeout(limit):
                function = self._functions[name]
                return (await call_foreign("it", function, dict(task), argument),)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001  (foreign code: fails only its rollouts)
            outcome = outcome_of_error(error, NO_GATEWAY)
            detail = f"rewards.{name} raised {outcome.reason}: {outcome.detail}"
            return replace(outcome, reason=BAD_COMPONENT, detail=detail)


def _failed(rollout: Rollout, outcome: Outcome) -> Rollout:
    """Return the rollout as failed, without a reward but with the agent's own metrics."""
    return replace(rollout, **outcome.fields | {"metrics": rollout.metrics}, components={})


def _checked(name: str, value: Any) -> Value:
    number = finite(value)
    if number is None:
        text = f"rewards.{name} returned {_words(value)}; expected a finite number"
        return failure(BAD_COMPONENT, text)
    return Judgement(number)


def _over_limit(fact: str, value: float) -> Outcome:
    text = f"{fact} {value:g}; expected at most rollout.max_abs_reward"
    return failure(BAD_COMPONENT, text)


def _words(value: Any) -> str:
    """Return a foreign value as a short text that a database accepts."""
    try:
        return storable(repr(value)[:200])
    except Exception:  # noqa: BLE001  (foreign code)
        return f"a {type(value).__name__}"


def make_scorer(
    rewards: Mapping[str, RewardConfig],
    store: Store,
    decode: Decode,
    limits: RolloutConfig,
    seed: int,
    gateway: Gateway | None,
) -> RewardScorer | None:
    """Return the scorer of a run, or None without components.

    `gateway` has started and answers judges that are no URL; without such it may be None. Raises
    ConfigError for a rubric, a key or a function that cannot be used.
    """
    if not rewards:
        return None

    judges = {
        name: Judge(reward.judge, endpoint_of(reward.judge, limits, gateway), store, limits, seed)
        for name, reward in rewards.items()
        if reward.judge
    }
    return RewardScorer(rewards, judges, store, decode, limits)
