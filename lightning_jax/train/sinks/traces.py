"""Export of finished rollouts as traces to an OTLP collector, on a thread of its own.

The process's own tracer provider and exporters stay as the agent's instrumentation set them.
"""

import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.rl.sequence import TrainingSequence
from lightning_jax.rollouts.config import AgentConfig
from lightning_jax.rollouts.runner import RolloutSink
from lightning_jax.settings import HIDDEN
from lightning_jax.system.threads import run_in_thread
from lightning_jax.traces import attributes
from lightning_jax.traces.config import FROM_ENVIRONMENT, TracesConfig
from lightning_jax.traces.export import Describe, FinishedRollout, to_trace
from lightning_jax.traces.store import Store
from lightning_jax.train.hook import Hook, UpdateInput
from lightning_jax.train.sinks.feed import Feed
from lightning_jax.train.sinks.messages import describe_call
from lightning_jax.train.sinks.otlp_client import OtlpClient, check_traces
from lightning_jax.types import Metrics, Rollout, Span

log = logging.getLogger(__name__)

PATH = "/v1/traces"
MAX_SPANS = 512  # of a request
MAX_CHARS = 2**22  # of the attributes of a request
MAX_WAITING = 20_000  # spans that the collector may be behind
Numbers = Mapping[str, Mapping[str, float]]  # attributes of calls by span id


@asynccontextmanager
async def open_traces(
    config: TracesConfig, store: Store, tokenizer: Tokenizer, agent: AgentConfig
) -> AsyncIterator["TraceExport | None"]:
    """Yield the export of the store's rollouts, or None if the settings name no collector.

    At the end, wait for what is not sent yet, up to `traces.close_s`.
    """
    if config.export is None:
        yield None
        return
    check_traces(config)
    export = TraceExport(config, store, tokenizer, agent_name(agent))
    try:
        yield export
    finally:
        await run_in_thread(export.close)


class TraceExport:
    """Thread that sends finished rollouts to a collector.

    Only rollouts wait for it. Their spans are read from the store when their turn comes. Spans that
    the collector does not take are counted and lost.
    """

    def __init__(
        self, config: TracesConfig, store: Store, tokenizer: Tokenizer, agent: str
    ) -> None:
        self._config, self._store, self._agent = config, store, agent
        self._describe = partial(describe_call, tokenizer=tokenizer) if config.content else None
        self._collector: _Collector | None = None
        self._feed: Feed[_Collector] = Feed("traces", self._open, self._warn, MAX_WAITING)

    def send(self, rollouts: Sequence[Rollout], numbers: Numbers | None = None) -> None:
        """Send rollouts, with `numbers` of their calls. Never waits for the collector."""
        sizes = self._store.num_spans([rollout.rollout_id for rollout in rollouts])
        for part, size in _parts(rollouts, lambda r: max(sizes.get(r.rollout_id, 0), 1)):
            self._feed.put(lambda place, part=part: place.send(part, numbers or {}), size)

    def counts(self) -> Metrics:
        """Return the numbers of spans so far that were sent, and that were lost."""
        sent = self._collector.num_sent if self._collector else 0
        return {
            "train/trace_spans_sent": float(sent),
            "train/trace_spans_lost": float(self._feed.num_lost),
        }

    def close(self) -> None:
        """Wait for what is not sent yet, but not for a collector that took nothing last time."""
        is_failing = self._collector is not None and self._collector.is_failing
        wait_s = 0.0 if is_failing else self._config.close_s
        self._feed.close(deadline=time.monotonic() + wait_s, limit="traces.close_s")
        if self._collector is not None:
            self._collector.close()
        if lost := self._feed.num_lost:
            log.warning(
                "%d spans of finished rollouts were sent, and %d were lost",
                *(self.counts()["train/trace_spans_sent"], lost),
                extra={"event": "traces_lost", "number": lost},
            )

    def _open(self) -> tuple["_Collector", tuple[()]]:
        self._collector = _Collector(
            *(self._config, self._store, self._agent, self._describe), self._lose
        )
        return self._collector, ()

    def _lose(self, number: int, reason: str) -> None:
        self._feed.lose(number, reason)

    def _warn(self, reason: str) -> None:
        log.warning(
            "traces could not be sent to %s (%s); the run continues, and the store has every span",
            *(endpoint_of(self._config) or "the collector", reason),
            extra={"event": "traces_failed", "reason": reason},
        )


class _Collector:
    """Collector of the settings, and what is sent to it. Only `close` is for other threads."""

    def __init__(
        self,
        config: TracesConfig,
        store: Store,
        agent: str,
        describe: Describe | None,
        lose: Callable[[int, str], None],
    ) -> None:
        self._store, self._agent, self._describe, self._lose = store, agent, describe, lose
        directory = Path(store.path).absolute().parent
        self._client = OtlpClient(endpoint_of(config), headers_of(config), directory.name)
        self.num_sent, self.is_failing = 0, False

    def send(self, rollouts: Sequence[Rollout], numbers: Numbers) -> None:
        """Send the traces of rollouts, in requests of bounded size."""
        for batch in batches(self._spans(rollouts, numbers)):
            num_taken, reason = self._client.send(batch)
            self.num_sent += num_taken
            self.is_failing = num_taken == 0
            if num_taken < len(batch):
                self._lose(len(batch) - num_taken, reason)

    def _spans(self, rollouts: Sequence[Rollout], numbers: Numbers) -> Iterator[Span]:
        for rollout in rollouts:
            spans = self._store.spans(rollout.rollout_id)
            task = self._store.task_fields(rollout.rollout_id)
            of_calls = {
                span.span_id: numbers[span.span_id] for span in spans if span.span_id in numbers
            }
            yield from to_trace(
                FinishedRollout(rollout, spans, task, of_calls, self._agent), self._describe
            )

    def close(self) -> None:
        """End a wait before a retry."""
        self._client.close()


class TracedRollouts(Hook):
    """Export of training rollouts, once the advantages of their step are known.

    All others are sent when they are finished; see `run_requests`.
    """

    def __init__(self, sink: RolloutSink) -> None:
        self._sink = sink
        self._rollouts: Sequence[Rollout] = ()

    async def before_rollouts(self, step: int) -> Metrics:
        return self._sink.counts()

    def after_rollouts(self, step: int, rollouts: Sequence[Rollout], metrics: Metrics) -> None:
        self._rollouts = tuple(rollouts)

    def before_update(
        self, step: int, update: UpdateInput
    ) -> tuple[Sequence[TrainingSequence], Metrics]:
        """Send the rollouts of the step, those that the step does not train on, too."""
        rollouts, self._rollouts = self._rollouts, ()
        if rollouts:
            self._sink.send(rollouts, numbers_of(update))
        return update.sequences, {}


def numbers_of(update: UpdateInput) -> dict[str, dict[str, float]]:
    """Return the reward of each call, and the advantage of each that trains, by span id.

    An advantage for each token becomes their mean.
    """
    # Sequences hold the calls' own tuples.
    advantages = {id(s.response_token_ids): s.advantage for s in update.sequences}
    numbers: dict[str, dict[str, float]] = {}
    for call in (call for trajectory in update.trajectories for call in trajectory.transitions):
        of_call = numbers[call.call_id] = {attributes.REWARD: call.reward} if call.reward else {}
        advantage = advantages.get(id(call.response_token_ids))
        if isinstance(advantage, tuple):
            advantage = sum(advantage) / max(len(advantage), 1)
        if advantage is not None:
            of_call[attributes.ADVANTAGE] = float(advantage)
    return numbers


def _parts(
    rollouts: Sequence[Rollout], size_of: Callable[[Rollout], int]
) -> Iterator[tuple[list[Rollout], int]]:
    """Yield parts with at most MAX_SPANS spans, if a rollout has no more, and their sizes."""
    part, size = list[Rollout](), 0
    for rollout in rollouts:
        number = size_of(rollout)
        if part and size + number > MAX_SPANS:
            yield part, size
            part, size = [], 0
        part.append(rollout)
        size += number
    if part:
        yield part, size


def batches(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """Yield the spans of each request: at most MAX_SPANS, and MAX_CHARS unless one has more."""
    batch, num_chars = list[Span](), 0
    for span in spans:
        size = sum(len(key) + num_chars_of(value) for key, value in span.attributes.items())
        if batch and (len(batch) == MAX_SPANS or num_chars + size > MAX_CHARS):
            yield batch
            batch, num_chars = [], 0
        batch.append(span)
        num_chars += size
    if batch:
        yield batch


def num_chars_of(value: Any) -> int:
    """Return the length of the texts in an attribute, with 8 for any other value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(str(key)) + num_chars_of(item) for key, item in value.items())
    return sum(map(num_chars_of, value)) if isinstance(value, list | tuple) else 8


def agent_name(config: AgentConfig) -> str:
    """Return the name of the agent that the settings run, or "" if they name none."""
    named = config.function or (config.command or ("",))[0]
    return Path(named).name


def endpoint_of(config: TracesConfig) -> str | None:
    """Return the URL that takes traces, or None if variables name it."""
    if config.export is None or config.export == FROM_ENVIRONMENT:
        return None
    url = config.export.rstrip("/")
    return url if url.endswith(PATH) else url + PATH


def headers_of(config: TracesConfig) -> dict[str, str]:
    """Return the headers of the settings, without those that saved settings hide."""
    pairs = (text.partition("=") for text in config.headers)
    return {name: value for name, _, value in pairs if value != HIDDEN}
