"""Judge over HTTP: cached, bounded in time and size, and tried again if it fails."""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, pstdev

import aiohttp

from lightning_jax.gateway.sessions import derive_seed
from lightning_jax.rollouts.config import INITIAL, JudgeConfig, RewardConfig, RolloutConfig
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

log = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 4 * 2**20
PREFIX = "judge-"  # of the model name and the role of a judge that the run serves itself
TRANSIENT = (408, 425, 429)  # statuses below 500 after which a second call may succeed


class JudgeFailed(Exception):
    """Judge without a usable answer after all attempts."""


@dataclass(frozen=True)
class Endpoint:
    """Address of a judge. `version` is of the weights that answer; 0 if they never change.

    A call has a limit of `timeout_s`. None: it waits, as the run serves the judge itself and may
    pause its engine.
    """

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    version: Callable[[], int] = lambda: 0
    timeout_s: float | None = None


@dataclass(frozen=True)
class Judgement:
    """Value of one attempt, with the judge's reasons."""

    value: float
    reason: str = ""


@dataclass
class Counts:
    """Costs of a judge since the counts were last read."""

    calls: int = 0
    failed_calls: int = 0
    cached_calls: int = 0
    tokens: int = 0
    seconds: float = 0.0
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

        Raises JudgeFailed.
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

        Raises JudgeFailed.
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
            text = await self._answer(body, request)
        await self._store.in_order(self._store.add_verdict, key, text)
        return read_scores(text, request)

    async def _answer(self, body: dict[str, object], request: JudgeRequest) -> str:
        """Return an answer with usable scores. Raises JudgeFailed after the last attempt."""
        limits, started, fact = self._limits, time.monotonic(), ""
        for attempt in range(1, limits.max_attempts + 1):
            self._counts.calls += 1
            may_recover = True
            try:
                text = await self._call(body)
                read_scores(text, request)
                self._counts.seconds += time.monotonic() - started
                return text
            except _Refused as error:
                fact, may_recover = str(error), error.status >= 500 or error.status in TRANSIENT
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                fact = f"it did not respond ({type(error).__name__}: {error})"
            except ValueError as error:
                fact = f"its answer cannot be used ({error})"
            self._counts.failed_calls += 1
            if attempt == limits.max_attempts or not may_recover:
                break
            log.info("judge at %s: %s; asking again", self._endpoint.url, fact)
            await asyncio.sleep(limits.backoff_s(attempt))
        self._counts.seconds += time.monotonic() - started
        raise JudgeFailed(f"the judge {self._endpoint.model} at {self._endpoint.url}: {fact}"[:500])

    async def _call(self, body: dict[str, object]) -> str:
        """Return the text of one answer, and count its tokens.

        Redirects are not followed, because they could send the key anywhere.
        """
        endpoint = self._endpoint
        headers = {"Content-Type": "application/json"}
        if endpoint.api_key:
            headers["Authorization"] = f"Bearer {endpoint.api_key}"
        limit = aiohttp.ClientTimeout(total=endpoint.timeout_s)
        url = f"{endpoint.url.rstrip('/')}/chat/completions"
        async with (
            aiohttp.ClientSession(timeout=limit) as session,
            session.post(url, json=body, headers=headers, allow_redirects=False) as answer,
        ):
            raw = bytearray()
            async for piece in answer.content.iter_any():
                raw += piece
                if len(raw) > MAX_ANSWER_BYTES:
                    raise ValueError(f"it is longer than {MAX_ANSWER_BYTES} bytes")
            text = raw.decode(errors="replace")
            if answer.status != 200:
                raise _Refused(answer.status, text)
        return self._content(text)

    def _content(self, text: str) -> str:
        """Return the message of an answer. Raises ValueError if there is none."""
        try:
            reply = json.loads(text)
            self._counts.tokens += int((reply.get("usage") or {}).get("total_tokens") or 0)
            content = reply["choices"][0]["message"]["content"]
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise ValueError("it is no chat completion") from error
        if not isinstance(content, str):
            raise ValueError("it has no text")
        return content


class _Refused(Exception):
    """Error status of a judge's server."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"status {status}: {' '.join(text[:300].split())}")
        self.status = status


def judge_roles(rewards: Mapping[str, RewardConfig]) -> dict[str, RoleConfig]:
    """Return the roles of the calls of judges that the run serves itself."""
    served = {reward.judge.served_by for reward in rewards.values() if reward.judge}
    roles = {}
    for name in sorted(name for name in served if "://" not in name):
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
