"""Record of a call: its spans, from start to end, or the error that ended it."""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_jax.engine.generation import Draining, EngineError, PromptTooLong, QueueFull
from lightning_jax.engine.grammar.compiler import GrammarError
from lightning_jax.engine.grammar.process import GrammarProcessLost
from lightning_jax.engine.logits import moves_logits, only_masks
from lightning_jax.engine.types import Completion, SamplingParams
from lightning_jax.gateway.calls.routing import Route
from lightning_jax.gateway.dialects.base import ReplyContext
from lightning_jax.gateway.errors import ApiError
from lightning_jax.gateway.metrics import Meters
from lightning_jax.gateway.prompt.grammar import guarantees_call
from lightning_jax.gateway.prompt.render import Rendered
from lightning_jax.gateway.request import PolicyRequest
from lightning_jax.gateway.sessions.open_rollouts import OpenRollout
from lightning_jax.gateway.sessions.owners import Owners
from lightning_jax.gateway.sessions.waits import waiting_for_store
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.traces import attributes
from lightning_jax.traces._sqlite import StoreError
from lightning_jax.traces.context import OpenSpan, SpanSink, parent_in
from lightning_jax.types import Span

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


class Unfit(ValueError):
    """Request that the engine cannot serve, such as a token id outside its vocabulary."""


@dataclass(frozen=True)
class SampledChoice:
    """One response to sample."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, kw_only=True)
class RoutedCall:
    """Call whose route is decided."""

    rollout: OpenRollout | None  # None: it is outside of rollouts
    route: Route

    @property
    def rollout_id(self) -> str | None:
        return self.rollout.settings.rollout_id if self.rollout else None

    @property
    def timeout_s(self) -> float | None:
        return self.rollout.settings.call_timeout_s if self.rollout else None


@dataclass(frozen=True, kw_only=True)
class IncomingCall(RoutedCall):
    """Request to the policy that has been read, but not rendered."""

    request: PolicyRequest
    headers: Mapping[str, str]
    num_bytes: int  # length of its body


@dataclass(frozen=True, kw_only=True)
class Call(RoutedCall):
    """Request to the policy for one or more responses."""

    token: str  # random
    request: PolicyRequest
    rendered: tuple[Rendered, ...]
    choices: tuple[SampledChoice, ...]
    served_model: str
    span: OpenSpan
    refusal: PromptTooLong | None = None  # if set, the call is recorded but not run

    @property
    def prefix_breaks(self) -> int:
        return sum(prompt.breaks for prompt in self.rendered)

    @property
    def call_id(self) -> str:
        return self.request.id_prefix + self.token

    def reply_context(self, tokenizer: Tokenizer) -> ReplyContext:
        """Return the context for a reply to the call."""
        prompts = tuple(choice.prompt_ids for choice in self.choices)
        return ReplyContext(
            self.token, int(time.time()), prompts, tokenizer, self.request.num_choices
        )

    def ended(self, completions: Sequence[Completion], num_malformed: int) -> tuple[Span, ...]:
        """Return the call's spans: its own, and one for each of several choices."""
        values = self._values | {attributes.MALFORMED_TOOL_CALLS: num_malformed or None}
        if len(completions) == 1:
            values |= _response_attributes(self.choices[0], completions[0])
            return (self.span.end(self._name, values),)
        values |= {
            attributes.RESPONSE_FINISH_REASONS: tuple(c.finish_reason for c in completions),
            attributes.USAGE_OUTPUT_TOKENS: sum(len(c.token_ids) for c in completions),
        }
        results = zip(self.choices, completions, strict=True)
        children = (
            self.span.child().end(
                "choice",
                {attributes.OPERATION_NAME: self._operation, attributes.CHOICE_INDEX: index}
                | self._identity(choice)
                | _response_attributes(choice, completion),
            )
            for index, (choice, completion) in enumerate(results)
        )
        return (*children, self.span.end(self._name, values))

    def failed(self, error: BaseException, answer: ApiError | None) -> Span:
        """Return the call's span. `answer` is the error that its client gets, if it gets one."""
        hung_up = isinstance(error, asyncio.CancelledError | ConnectionError)
        reason = "call_cancelled" if hung_up else "call_error"
        message = str(error) or "the client disconnected before the response was complete"
        if answer:
            reason, message = answer.code, answer.message
        return self.span.fail(self._name, self._values, reason, message)

    @property
    def _operation(self) -> str:
        return attributes.TEXT_COMPLETION if self.request.messages is None else attributes.CHAT

    @property
    def _name(self) -> str:
        return f"{self._operation} {self.request.model}"

    @property
    def _values(self) -> dict[str, Any]:
        first, count = self.choices[0].sampling, len(self.choices)
        kwargs = self.request.chat_template_kwargs or None
        prompts = dict.fromkeys(choice.prompt_ids for choice in self.choices)
        num_tokens = self.refusal.num_tokens if self.refusal else sum(map(len, prompts))
        return {
            attributes.OPERATION_NAME: self._operation,
            attributes.DIALECT: self.request.dialect,
            attributes.PROVIDER_NAME: "lightning_jax",
            attributes.REQUEST_MODEL: self.request.model,
            attributes.RESPONSE_MODEL: self.served_model,
            attributes.RESPONSE_ID: self.call_id,
            attributes.REQUEST_CHOICE_COUNT: count if count > 1 else None,
            attributes.REQUEST_MAX_TOKENS: first.max_tokens,
            attributes.REQUEST_TOP_P: first.top_p,
            attributes.REQUEST_TOP_K: first.top_k,
            attributes.REQUEST_MIN_P: first.min_p,
            attributes.CHAT_TEMPLATE_KWARGS: kwargs and json.dumps(kwargs, sort_keys=True),
            attributes.REQUEST_SEED: first.seed,
            attributes.REQUEST_STOP_SEQUENCES: first.stop or None,
            attributes.AGENT_NAME: self.request.agent or None,
            attributes.USAGE_INPUT_TOKENS: num_tokens,
            attributes.PREFIX_BREAKS: self.prefix_breaks,
            attributes.ADJUSTED: any(moves_logits(choice.sampling) for choice in self.choices)
            or None,
            **self._identity(self.choices[0]),
        }

    def _identity(self, choice: SampledChoice) -> dict[str, Any]:
        """Return the attributes that a call's span and the spans of its choices share."""
        return {
            attributes.ROLLOUT_ID: self.rollout_id,
            attributes.AGENT: self.request.agent,
            attributes.POLICY: self.request.model,
            attributes.PROMPT_TOKEN_IDS: choice.prompt_ids,
            attributes.REQUEST_TEMPERATURE: choice.sampling.temperature,
            **self.route.attributes,
        }


@dataclass(frozen=True)
class Recorder:
    """Writer of calls' spans to the store. Without a store, spans are discarded."""

    store: SpanSink | None
    owners: Owners
    meters: Meters

    def begin(self, headers: Mapping[str, str], rollout: OpenRollout | None) -> OpenSpan:
        """Begin the span of a call.

        Its parent is the span that the traceparent names, else the rollout's root, else none. A
        traceparent of another rollout is ignored and counted.
        """
        parent = parent_in(headers) if "traceparent" in headers else None
        if rollout and (parent is None or not self.owners.claim(rollout.owner, parent[0])):
            self.meters.count("ignored_traceparents", int(parent is not None))
            parent = rollout.root.trace_id, rollout.root.span_id
        sequence = self.store.next_sequence() if self.store else None
        return OpenSpan(*parent, sequence) if parent else OpenSpan(sequence=sequence)

    async def write(self, rollout_id: str | None, *spans: Span) -> None:
        """Return once the spans are stored. Raise ApiError if they cannot be written."""
        if self.store is None:
            return
        try:
            with waiting_for_store():
                await self.store.record(rollout_id, *spans)
        except StoreError as error:
            raise _server_error(
                500, "store_error", f"the call could not be recorded: {error}"
            ) from error


def error_of(error: BaseException, call: Call) -> ApiError | None:
    """Return the error for a failed call, or None if the client is gone or it is our bug."""
    match error:
        case PromptTooLong():
            return ApiError(400, CONTEXT_LENGTH_EXCEEDED, str(error), param="messages")
        case GrammarError():
            param = "tools" if guarantees_call(call.request) else "response_format"
            return ApiError(400, "invalid_schema", str(error), param=param)
        case Unfit():
            return ApiError(400, "invalid_value", str(error))
        case QueueFull():
            # Not infrastructure: only a caller that already fills its share of the queue gets this.
            return ApiError(429, "queue_full", str(error), retry_after_s=1)
        case Draining():
            return _server_error(503, "draining", str(error), retry_after_s=5)
        case ConnectionError():
            return None
        case TimeoutError():
            return _server_error(
                504,
                "call_timeout",
                f"the call waited for the engine for longer than {call.timeout_s:g} s, with "
                f"{sum(len(choice.prompt_ids) for choice in call.choices)} prompt tokens; raise "
                "rollout.call_timeout_s, or lower rollout.concurrency if it waited for others.",
            )
        case EngineError() | GrammarProcessLost():
            return _server_error(500, "engine_error", str(error))
    return None


def _server_error(
    status: int, code: str, message: str, retry_after_s: int | None = None
) -> ApiError:
    return ApiError(status, code, message, retry_after_s=retry_after_s, infrastructure=True)


def _response_attributes(choice: SampledChoice, completion: Completion) -> dict[str, Any]:
    is_tempered = choice.sampling.temperature not in (0.0, 1.0)
    return {
        attributes.FORCED: completion.forced if any(completion.forced) else None,
        attributes.LATE: completion.is_late or None,
        attributes.GRAMMAR: choice.sampling.grammar if only_masks(choice.sampling) else None,
        attributes.TEMPERED_LOGPROBS: completion.tempered_logprobs if is_tempered else None,
        attributes.RESPONSE_FINISH_REASONS: (completion.finish_reason,),
        attributes.USAGE_OUTPUT_TOKENS: len(completion.token_ids),
        attributes.RESPONSE_TOKEN_IDS: completion.token_ids,
        attributes.BEHAVIOR_LOGPROBS: completion.behavior_logprobs,
        attributes.SAMPLING_LOGPROBS: completion.sampling_logprobs,
        attributes.POLICY_VERSIONS: completion.policy_versions,
    }
