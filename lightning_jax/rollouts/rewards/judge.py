"""Judge over HTTP: bounded in time and size, and tried again if it fails.

Verdicts are noisy, so equal texts do not share the first one. Each attempt asks for its own, which
the store keeps, and gets the mean of all that are known for its text.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, pstdev

from lightning_jax.gateway.sessions.open_rollouts import derive_seed
from lightning_jax.rollouts.config import JudgeConfig, RolloutConfig
from lightning_jax.rollouts.rewards.chat import PREFIX, ChatCounts, Endpoint, ask
from lightning_jax.rollouts.rewards.components import Attempt
from lightning_jax.rollouts.rewards.verdicts import (
    MAX_REASON_CHARS,
    MAX_SCORE,
    NOTHING_TO_COMPARE,
    ComparisonRequest,
    Judgement,
    JudgeRequest,
    Rubric,
    assessment,
    comparison,
    read_rubric,
    read_scores,
    verdict_digest,
)
from lightning_jax.traces.config import RoleConfig
from lightning_jax.traces.store import Store
from lightning_jax.types import Metrics


@dataclass
class Counts(ChatCounts):
    """Costs of a judge since the counts were last read."""

    cached_calls: int = 0
    disagreements: list[float] = field(default_factory=list)

    def metrics(self, prefix: str) -> Metrics:
        metrics = {
            f"{prefix}calls": float(self.calls),
            f"{prefix}failed_calls": float(self.failed_calls),
            f"{prefix}cached_calls": float(self.cached_calls),
            f"{prefix}tokens": float(self.tokens),
            f"{prefix}s": self.seconds,
        }
        if self.disagreements:
            metrics[f"{prefix}disagreement"] = fmean(self.disagreements)
        return metrics


class Judge:
    """Judge of one component. Its answers are kept in the store, by the rollout that asked."""

    def __init__(
        self,
        config: JudgeConfig,
        endpoint: Endpoint,
        store: Store,
        limits: RolloutConfig,
        seed: int,
    ) -> None:
        """`limits` has the time of a call and the number of attempts and their backoff.

        Raises ConfigError for a rubric that cannot be used.
        """
        self._config, self._endpoint, self._store = config, endpoint, store
        self._limits, self._seed = limits, seed
        self._rubric: Rubric | None = read_rubric(config.rubric) if config.rubric else None
        self._gate = asyncio.Semaphore(config.concurrency)
        self._counts = Counts()

    def take_counts(self) -> Counts:
        """Return the counts, and begin new ones."""
        counts, self._counts = self._counts, Counts()
        return counts

    async def compare(self, task: str, attempts: Sequence[Attempt]) -> list[Judgement]:
        """Return values from 0 to 1 of the attempts of a group.

        A value is the mean over all verdicts on the same texts. Each has another order. Raises
        ChatFailed.
        """
        config = self._config
        same = comparison(task, attempts, config, 0)  # in an order that all such groups share
        if same is None:
            return [Judgement(NOTHING_TO_COMPARE) for _ in attempts]

        def ordered(asker: str) -> ComparisonRequest:
            request = comparison(task, attempts, config, derive_seed(self._seed, asker))
            assert request is not None, "the texts differ"
            return request

        askers = self._askers(attempts[:1])  # the first attempt stands for its group
        most = max(config.repeats, config.max_verdicts)
        by_asker = await self._verdicts(same, askers, most, ordered)
        verdicts: list[dict[str, Judgement]] = [{} for _ in attempts]
        for asker, scores in by_asker.items():
            for verdict, key in zip(verdicts, ordered(asker).keys, strict=True):
                verdict[asker] = replace(scores[key], value=scores[key].value / MAX_SCORE)
        return [self._mean(column, askers) for column in verdicts]

    async def assess(self, task: str, attempts: Sequence[Attempt]) -> list[Judgement]:
        """Return values by the rubric of attempts with equal texts, whose value is the same.

        It is the mean over all verdicts on this text. A judge at temperature 0 is asked once,
        because all its verdicts would be equal. Raises ChatFailed.
        """
        config, rubric = self._config, self._rubric
        assert rubric is not None, "a judge without a rubric compares"
        request = assessment(task, attempts[0], config, rubric)
        most = max(config.repeats, config.max_verdicts) if config.temperature else 1
        by_asker = await self._verdicts(request, self._askers(attempts), most, lambda _: request)
        verdicts: dict[str, Judgement] = {}
        for asker, scores in by_asker.items():
            value = rubric.value({name: score.value for name, score in scores.items()})
            reasons = [f"{name} {score.value}: {score.reason}" for name, score in scores.items()]
            verdicts[asker] = Judgement(value, "\n".join(reasons) if config.reasons else "")
        return [self._mean(verdicts, self._askers([attempt])) for attempt in attempts]

    def _askers(self, attempts: Sequence[Attempt]) -> list[str]:
        """Return the names under which the attempts ask for their verdicts."""
        repeats = range(self._config.repeats)
        return [f"{attempt.rollout_id}/{n}" for attempt in attempts for n in repeats]

    def _mean(self, verdicts: Mapping[str, Judgement], askers: Sequence[str]) -> Judgement:
        """Return the mean of all verdicts, with the reasons of these askers or of the first."""
        values = [verdict.value for verdict in verdicts.values()]
        if len(values) > 1:
            self._counts.disagreements.append(pstdev(values))
        written = [verdicts[asker].reason for asker in askers if asker in verdicts]
        reasons = written or [next(iter(verdicts.values())).reason]
        return Judgement(fmean(values), "\n".join(filter(None, reasons)))

    async def _verdicts(
        self,
        same: JudgeRequest,
        askers: Sequence[str],
        most: int,
        request_of: Callable[[str], JudgeRequest],
    ) -> dict[str, dict[str, Judgement]]:
        """Return the scores of all verdicts on the texts of a request, by asker.

        Askers without a verdict get one while there are fewer than `most`.
        """
        # Stores from before verdicts had askers have the first one under the same digest.
        key = verdict_digest(self._config.served_by, self._endpoint.version(), self._body(same), 0)
        stored = await self._store.in_order(self._store.verdicts, key)
        new = [asker for asker in askers if asker not in stored][: max(most - len(stored), 0)]
        self._counts.cached_calls += len(askers) - len(new)
        await asyncio.gather(*(self._ask(key, asker, request_of(asker)) for asker in new))
        stored = await self._store.in_order(self._store.verdicts, key)
        return {asker: read_scores(text, request_of(asker)) for asker, text in stored.items()}

    async def _ask(self, key: str, asker: str, request: JudgeRequest) -> None:
        body = self._body(request) | {"seed": derive_seed(self._seed, key, asker)}
        async with self._gate:
            text = await ask(
                self._endpoint,
                body,
                self._limits,
                self._counts,
                lambda text: read_scores(text, request),
            )
        await self._store.in_order(self._store.add_verdict, key, asker, text)

    def _body(self, request: JudgeRequest) -> dict[str, object]:
        """Return the body of a call without its seed."""
        config = self._config
        schema = request.schema if config.url else _bounded(request.schema)
        return {
            "model": self._endpoint.model,
            "messages": list(request.messages),
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "verdict", "strict": True, "schema": schema},
            },
        }


def judge_roles(served_by: Iterable[str]) -> dict[str, RoleConfig]:
    """Return the roles of the calls of judges, or of others, that the run serves itself."""
    names = sorted({name for name in served_by if "://" not in name})
    return {PREFIX + n: RoleConfig(model=PREFIX + n, trains=False, policy=n) for n in names}


def _bounded(schema: dict) -> dict:
    """Return the schema with bounded texts, which the run's own server guarantees.

    A small model might never end one.
    """
    if schema.get("type") == "string":
        return {**schema, "maxLength": MAX_REASON_CHARS}
    if "properties" in schema:
        inner = {name: _bounded(value) for name, value in schema["properties"].items()}
        return {**schema, "properties": inner}
    return schema
