"""Reports of agents: rewards, and spans of their own instrumentation."""

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

from lightning_jax.errors import brief
from lightning_jax.gateway.errors import ApiError, invalid
from lightning_jax.gateway.fields import Body, Fields, FiniteNumber, Integer
from lightning_jax.gateway.metrics import Meters
from lightning_jax.gateway.sessions.open_rollouts import AnsweredCall, OpenRollout
from lightning_jax.gateway.sessions.owners import Owner, Owners
from lightning_jax.gateway.sessions.waits import waiting_for_store
from lightning_jax.traces import attributes
from lightning_jax.traces.context import OpenSpan, SpanSink
from lightning_jax.traces.otlp import MAX_SPAN_BYTES, MAX_SPANS, Export, stored_size
from lightning_jax.types import Span

log = logging.getLogger(__name__)

LAST = "last"
PART_SPANS, PART_BYTES = 64, 2**19  # limits of posted spans that are written at once
# Reasons for refusing spans.
UNKNOWN = "their trace ids belong to no rollout"
FOREIGN = "their trace id is another rollout's, or their ids repeat those of a recorded span"
TOO_MANY_SENT = (
    f"a request may have at most {MAX_SPANS} spans of {MAX_SPAN_BYTES} bytes; send fewer or "
    "smaller ones"
)
CALLS_ALONE = (
    "reports of a program do not count where something else gives its reward; set agent.posts"
)
TOO_MANY_KEPT = "their rollout has reached rollout.max_spans or rollout.max_spans_mib"


class RewardFields(Fields):
    """Reward for one choice of a call of a rollout, or without a call for the whole rollout."""

    reward: FiniteNumber
    call: str | None = None
    choice: Integer | None = None


class Reports:
    """Writer of rewards and spans into the store, each for its own rollout."""

    def __init__(self, store: SpanSink | None, owners: Owners, meters: Meters) -> None:
        self._store = store
        self._owners = owners
        self._meters = meters
        self._has_warned = False  # of an ignored report

    async def add_spans(self, export: Export, owner: Owner | None) -> Counter[str]:
        """Record spans for `owner`, or if it is None, for the owners of the spans' traces.

        Return the number of refused spans by reason.
        """
        refused: Counter[str] = Counter({TOO_MANY_SENT: export.num_excess})
        theirs: dict[Owner, list[tuple[Span, int]]] = {}
        for span, size in zip(export.spans, export.sizes, strict=True):
            of_trace = self._owners.of_trace(span.trace_id)
            whose = owner or of_trace
            if whose is None or self._store is None:
                refused[UNKNOWN] += 1
            elif _is_foreign(span, whose, of_trace):
                refused[FOREIGN] += 1
            else:
                theirs.setdefault(whose, []).append((span, size))
        for whose, sized in theirs.items():
            await self._record(whose, sized, refused)
        self._meters.count("spans", len(export.spans) + export.num_excess - refused.total())
        self._meters.count("unknown_spans", refused[UNKNOWN])
        self._meters.count("foreign_spans", refused[FOREIGN])
        self._meters.count("excess_spans", refused[TOO_MANY_SENT] + refused[TOO_MANY_KEPT])
        self._meters.count("dropped_attributes", export.num_dropped_attributes)
        return +refused

    async def _record(
        self, owner: Owner, sized: list[tuple[Span, int]], refused: Counter[str]
    ) -> None:
        """Record the spans that the owner has room for; each comes with its size in bytes."""
        assert self._store is not None, "add_spans has refused all spans"
        fitting = [(span, size) for span, size in sized if owner.reserve(size)]
        refused[TOO_MANY_KEPT] += len(sized) - len(fitting)
        for part in _parts(fitting):  # so that spans of calls can go in between
            spans = [span for span, _ in part]
            with waiting_for_store():
                are_new, num_taken = await self._store.record_posted(owner.rollout_id, spans)
            refused[FOREIGN] += num_taken
            for (_, size), is_new in zip(part, are_new, strict=True):
                if not is_new:  # it was sent twice
                    owner.num_spans, owner.num_bytes = owner.num_spans - 1, owner.num_bytes - size

    def ignore_spans(self, export: Export, owner: Owner | None) -> Counter[str]:
        """Count spans that do not count. Return their number by reason, as `add_spans` does."""
        number = len(export.spans) + export.num_excess
        if number and owner is not None:
            self._ignore(owner.rollout_id, "spans", number)
        return +Counter({CALLS_ALONE: number})

    def _ignore(self, rollout_id: str, what: str, number: int = 1) -> None:
        """Count a report that does not count, and warn of the first."""
        self._meters.count("ignored_reports", number)
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s: a program posted %s, which is ignored because something else gives its "
                "reward; set agent.posts to count what programs post (docs/agents.md)",
                rollout_id,
                what,
                extra={"event": "ignored_report", "rollout_id": rollout_id},
            )

    async def reward(
        self, body: Body, rollout: OpenRollout, *, should_count: bool = True
    ) -> dict[str, Any]:
        """Record a reward and return the response body.

        `{"reward": 0.5}` is for the rollout, and with `"call": ID` for one of its calls. Without
        `should_count`, it is ignored and counted as such. Raise ApiError if it is invalid.
        """
        rewarded, limit = RewardFields.read(body), rollout.settings.max_abs_reward
        reward, call_id, choice = rewarded.reward, rewarded.call, rewarded.choice or 0
        check_size("reward", reward, limit)
        rollout_id = rollout.settings.rollout_id
        if not should_count:
            self._ignore(rollout_id, "a reward")
            return {"rollout": rollout_id, "ignored": CALLS_ALONE}
        if not call_id:
            rollout.reward = reward
            return {"rollout": rollout_id, "reward": reward}
        call = _find_call(rollout, call_id)
        if not 0 <= choice < call.num_choices:
            raise invalid(
                f"choice is {choice}, but the call has {call.num_choices} choices; expected 0 to "
                f"{call.num_choices - 1}.",
                "choice",
                reason="out_of_range",
            )
        call_id = call.call_id  # instead of "last"
        total = rollout.call_rewards.get((call_id, choice), 0.0) + reward
        check_size("reward of the call", total, limit)
        values = {
            attributes.ROLLOUT_ID: rollout_id,
            attributes.REWARD: reward,
            attributes.REWARD_CALL: call_id,
            attributes.REWARD_CHOICE: choice,
        }
        span = OpenSpan(call.span.trace_id, call.span.span_id).end("reward", values)
        if not rollout.owner.reserve(stored_size(span)):
            raise ApiError(
                413,
                "too_many_spans",
                f"rollout {rollout_id!r} has reached rollout.max_spans "
                f"({rollout.settings.max_spans}) or rollout.max_spans_mib "
                f"({rollout.settings.max_spans_mib:g}); post fewer spans and rewards.",
            )
        assert self._store is not None, "a call is answered once its span is in the store"
        rollout.call_rewards[call_id, choice] = total
        with waiting_for_store():
            await self._store.record(rollout_id, span)
        return {"rollout": rollout_id, "call": call_id, "choice": choice, "reward": reward}


def _find_call(rollout: OpenRollout, call_id: str) -> AnsweredCall:
    answered = rollout.answered
    newest = next(reversed(answered), "")
    if call := answered.get(newest if call_id == LAST else call_id):
        return call
    raise ApiError(
        404,
        "call_not_found",
        f"call {brief(call_id)} is not among the {len(answered)} answered calls of rollout "
        f"{rollout.settings.rollout_id!r}; pass a response id, or {LAST!r} for the newest.",
        param="call",
    )


def check_size(name: str, value: float, limit: float) -> None:
    """Raise ApiError if a reward, which the message calls `name`, is above the limit."""
    if abs(value) > limit:
        raise invalid(
            f"{name} is {value:g}; expected a magnitude of at most {limit:g} "
            "(rollout.max_abs_reward).",
            "reward",
            reason="out_of_range",
            key="rollout.max_abs_reward",
        )


def _parts(sized: list[tuple[Span, int]]) -> Iterator[list[tuple[Span, int]]]:
    """Yield batches of spans that are short enough for calls to wait while one is written."""
    part: list[tuple[Span, int]] = []
    for item in sized:
        if part and (len(part) == PART_SPANS or sum(n for _, n in part) + item[1] > PART_BYTES):
            yield part
            part = []
        part.append(item)
    if part:
        yield part


def _is_foreign(span: Span, owner: Owner, of_trace: Owner | None) -> bool:
    """Return whether a span is in another rollout's own trace, or has the ids of a root span.

    Two rollouts may bring equal trace ids with their calls, because agents seed their id
    generators. The store keeps the spans of such traces apart.
    """
    if of_trace is None or of_trace.root.trace_id != span.trace_id:
        return False
    return of_trace is not owner or of_trace.root.span_id == span.span_id
