"""Judge over HTTP: cached, bounded in time and size, and tried again if it fails."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, pstdev

from lightning_jax.gateway.sessions import derive_seed
from lightning_jax.rollouts.chat import PREFIX, ChatCounts, Endpoint, ask
from lightning_jax.rollouts.config import INITIAL, JudgeConfig, RolloutConfig
from lightning_jax.rollouts.rewards import Attempt
from lightning_jax.rollouts.rubric import Rubric, read_rubric
from lightning_jax.rollouts.verdicts import (
    MAX_REASON_CHARS,
    MAX_SCORE,
    NOTHING_TO_COMPARE,
    JudgeRequest,
    Score,
    assessment,
    comparison,
    digest,
    read_scores,
)
from lightning_jax.traces.config import RoleConfig
from lightning_jax.traces.store import Store
from lightning_jax.types import Metrics


@dataclass(frozen=True)
class Judgement:
    """Value of one attempt, with the judge's reasons."""

    value: float
    reason: str = ""


@dataclass
class Counts(ChatCounts):
    """Costs of a judge since the counts were last read."""

    cached_calls: int = 0
    disagreements: list[float] = field(default_factory=list)

    def metrics(self, prefix: str) -> Metrics:
        found = {
            f"{prefix}calls": float(self.calls),
            f"{prefix}failed_calls": float(self.failed_calls),
            f"{prefix}cached_calls": float(self.cached_calls),
            f"{prefix}tokens": float(self.tokens),
            f"{prefix}s": self.seconds,
        }
        if self.disagreements:
            found[f"{prefix}disagreement"] = fmean(self.disagreements)
        return found


class Judge:
    """Judge of one component. Its answers are kept in the store."""

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
        taken, self._counts = self._counts, Counts()
        return taken

    async def compare(self, task: str, attempts: Sequence[Attempt]) -> list[Judgement]:
        """Return the mean of `repeats` verdicts on the attempts of a group, from 0 to 1.

        Raises ChatFailed.
        """
        texts = [attempt.transcript for attempt in attempts]
        seeds = [derive_seed(self._seed, digest(texts), n) for n in range(self._config.repeats)]
        asked = [comparison(task, attempts, self._config, seed) for seed in seeds]
        if None in asked:
            return [Judgement(NOTHING_TO_COMPARE) for _ in attempts]
        found = await asyncio.gather(
            *(self._ask(c.request, n) for n, c in enumerate(asked) if c is not None)
        )
        verdicts = [
            [(scores[key].score / MAX_SCORE, scores[key].reason) for key in c.keys]
            for scores, c in zip(found, asked, strict=True)
            if c is not None
        ]
        return [self._mean(column) for column in zip(*verdicts, strict=True)]

    async def assess(self, task: str, attempt: Attempt) -> Judgement:
        """Return the mean of `repeats` verdicts on one attempt by the rubric.

        Raises ChatFailed.
        """
        assert self._rubric is not None, "a judge without a rubric compares"
        request = assessment(task, attempt, self._config, self._rubric)
        repeats = range(self._config.repeats)
        verdicts = []
        for scores in await asyncio.gather(*(self._ask(request, number) for number in repeats)):
            value = self._rubric.value({name: found.score for name, found in scores.items()})
            reasons = [f"{name} {found.score}: {found.reason}" for name, found in scores.items()]
            verdicts.append((value, "\n".join(reasons) if self._config.reasons else ""))
        return self._mean(verdicts)

    def _mean(self, verdicts: Sequence[tuple[float, str]]) -> Judgement:
        values = [value for value, _ in verdicts]
        if len(values) > 1:
            self._counts.disagreements.append(pstdev(values))
        return Judgement(fmean(values), "\n".join(filter(None, (words for _, words in verdicts))))

    async def _ask(self, request: JudgeRequest, repeat: int) -> dict[str, Score]:
        """Return the scores of one verdict, from the store if it has this one."""
        config, endpoint = self._config, self._endpoint
        schema = request.schema if config.is_url else _bounded(request.schema)
        body = {
            "model": endpoint.model,
            "messages": list(request.messages),
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "verdict", "strict": True, "schema": schema},
            },
        }
        key = digest(config.served_by, endpoint.version(), body, repeat)
        if (known := await self._store.in_order(self._store.verdict, key)) is not None:
            self._counts.cached_calls += 1
            return read_scores(known, request)
        body["seed"] = derive_seed(self._seed, key)
        async with self._gate:
            text = await ask(
                endpoint, body, self._limits, self._counts, lambda text: read_scores(text, request)
            )
        await self._store.in_order(self._store.add_verdict, key, text)
        return read_scores(text, request)


def judge_roles(served_by: Iterable[str]) -> dict[str, RoleConfig]:
    """Return the roles of the calls of judges, or of others, that the run serves itself."""
    roles = {}
    for name in sorted({name for name in served_by if "://" not in name}):
        role = RoleConfig(model=PREFIX + name, trains=False)
        is_initial = name == INITIAL
        roles[PREFIX + name] = replace(
            role, **({"served_by": INITIAL} if is_initial else {"policy": name})
        )
    return roles


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
