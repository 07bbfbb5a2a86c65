"""What agents tell besides their calls: rewards, and the spans of their own instrumentation."""

import contextlib
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from opentelemetry import trace

from lightning_jax.gateway.errors import ApiError, invalid
from lightning_jax.gateway.fields import Body, brief, integer, text
from lightning_jax.gateway.rollouts import AnsweredCall, OpenRollout
from lightning_jax.store import Store
from lightning_jax.tracing import attributes as names
from lightning_jax.tracing.tracer import parent_of, trace_id_of
from lightning_jax.types import Span

MAX_TRACES = 20_000  # whose rollout is remembered: exporters send in batches, so spans come late
LAST = "last"
SPANS_AT_ONCE = 500  # of an export, in one transaction


class Reports:
    """Writes them into the store, each to the rollout that it belongs to."""

    def __init__(self, store: Store | None) -> None:
        self._store = store
        self._rollouts: OrderedDict[str, str] = OrderedDict()  # by trace id

    def expect(self, rollout_id: str, headers: Mapping[str, str] | None = None) -> None:
        """Spans of the rollout's own trace, or of the one that a call's headers name, are its."""
        trace_id = trace_id_of(rollout_id)
        if headers is not None and "traceparent" in headers:
            context = trace.get_current_span(parent_of(headers, rollout_id)).get_span_context()
            trace_id = trace.format_trace_id(context.trace_id)
        self._rollouts[trace_id] = rollout_id
        self._rollouts.move_to_end(trace_id)
        if len(self._rollouts) > MAX_TRACES:
            self._rollouts.popitem(last=False)

    async def add_spans(self, spans: list[Span], rollout_id: str | None) -> int:
        """Records spans of the rollout, or, where it is None, of those that their traces belong to;
        how many belong to none.
        """
        owners = [rollout_id or self._rollouts.get(span.trace_id) for span in spans]
        owned = [(owner, span) for owner, span in zip(owners, spans, strict=True) if owner]
        if self._store is None:
            return len(spans)
        for first in range(0, len(owned), SPANS_AT_ONCE):  # calls' spans may go between
            await self._store.in_order(
                self._store.add_spans, owned[first : first + SPANS_AT_ONCE], again=True
            )
        return len(spans) - len(owned)

    async def reward(self, body: Body, rollout: OpenRollout) -> dict[str, Any]:
        """Takes `{"reward": 0.5}` for the rollout, or with `"call": ID` for one of its calls; the
        answer. Raises ApiError.
        """
        reward, limit = _finite(body), rollout.settings.max_abs_reward
        _check_size("reward", reward, limit)
        call_id, choice = text(body, "call"), integer(body, "choice", 0) or 0
        rollout_id = rollout.settings.rollout_id
        if not call_id:
            rollout.reward = reward
            return {"rollout": rollout_id, "reward": reward}
        call = _find_call(rollout, call_id)
        if not 0 <= choice < call.num_choices:
            raise invalid(
                f"choice is {choice}; expected 0 to {call.num_choices - 1}, as the call has "
                f"{call.num_choices} choices.",
                "choice",
            )
        now, known_id = time.time_ns(), call.call_id
        total = rollout.call_rewards.get((known_id, choice), 0.0) + reward
        _check_size("reward of the call", total, limit)
        rollout.call_rewards[known_id, choice] = total
        values = {
            names.ROLLOUT_ID: rollout_id,
            names.REWARD: reward,
            names.REWARD_CALL: known_id,
            names.REWARD_CHOICE: choice,
        }
        span_id = secrets.token_hex(8)
        assert self._store is not None, "a call is answered once its span is in the store"
        span = Span(call.trace_id, span_id, call.span_id, "reward", now, now, values)
        await self._store.in_order(self._store.add_span, rollout_id, span)
        return {"rollout": rollout_id, "call": known_id, "choice": choice, "reward": reward}


def _find_call(rollout: OpenRollout, call_id: str) -> AnsweredCall:
    answered = rollout.answered
    newest = next(reversed(answered), "")
    if found := answered.get(newest if call_id == LAST else call_id):
        return found
    raise ApiError(
        404,
        "call_not_found",
        f"call {brief(call_id)} is none of the {len(answered)} answered calls of rollout "
        f"{rollout.settings.rollout_id!r}; expected the id of a response, or {LAST!r} for the "
        "newest.",
        param="call",
    )


def _check_size(name: str, value: float, limit: float) -> None:
    if abs(value) > limit:
        raise invalid(
            f"{name} is {value:g}; expected a magnitude of at most {limit:g} "
            "(rollout.max_abs_reward).",
            "reward",
        )


def _finite(body: Body) -> float:
    reward = body.get("reward")
    if not isinstance(reward, bool) and isinstance(reward, int | float):
        with contextlib.suppress(OverflowError):
            if math.isfinite(reward):
                return float(reward)
    raise invalid(f"reward is {brief(reward)}; expected a finite number.", "reward")
