"""Path of every call, in any dialect, to the engine and into a span."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from lightning_jax.engine.admission import LoopStatus
from lightning_jax.engine.generation import (
    Draining,
    EngineError,
    Generation,
    PromptTooLong,
    QueueFull,
)
from lightning_jax.engine.grammar import GrammarError
from lightning_jax.engine.grammar_process import GrammarProcessLost
from lightning_jax.engine.logits import moves_logits
from lightning_jax.engine.response import Chunk
from lightning_jax.engine.types import Completion, SamplingParams
from lightning_jax.gateway.errors import ApiError
from lightning_jax.traces import attributes
from lightning_jax.traces._sqlite import StoreError
from lightning_jax.traces.context import OpenSpan
from lightning_jax.traces.store import Store
from lightning_jax.types import Span

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
OnAccept = Callable[[], Awaitable[None]]
OnChunk = Callable[[int, Chunk], Awaitable[None]]
OnDone = Callable[[], Mapping[str, Any]]


class _Unfit(ValueError):
    """Request that the engine cannot serve, such as a token id outside its vocabulary."""


@runtime_checkable
class PolicyLoop(Protocol):
    """Interface of an engine loop for the gateway, implemented by EngineLoop and JetStreamLoop."""

    @property
    def status(self) -> LoopStatus: ...

    @property
    def num_slots(self) -> int: ...

    async def prepare(self, grammar: str, owner: str = "") -> None: ...

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        adapter: int | None = None,
        tenant: str | None = None,
    ) -> Generation: ...

    def stats(self) -> dict[str, float]: ...


@dataclass(frozen=True)
class Choice:
    """One response to sample."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True)
class Call:
    """Request to the policy for one or more responses."""

    call_id: str
    dialect: str
    operation: str  # name in OpenTelemetry's GenAI conventions
    choices: tuple[Choice, ...]
    policy: str  # the requested model name
    served_model: str
    agent: str
    rollout_id: str | None
    timeout_s: float | None
    prefix_breaks: int
    span: OpenSpan
    role: str = ""  # one of the config's roles
    answered_by: str = ""  # the policy that answers; "": there is only one
    adapter: int | None = None  # index of that policy's adapter
    guarantees_call: bool = False  # the grammar is for its tools, else for its answer
    refusal: PromptTooLong | None = None  # if set, the call is recorded but not run

    def ended(
        self, completions: Sequence[Completion], values: Mapping[str, Any]
    ) -> tuple[Span, ...]:
        """Return the call's spans: its own, with `values`, and one for each of several choices."""
        if len(completions) == 1:
            values = {**values, **_response_attributes(self.choices[0], completions[0])}
            return (self.span.end(self._name, _request_attributes(self) | values),)
        values = {
            **values,
            attributes.RESPONSE_FINISH_REASONS: tuple(c.finish_reason for c in completions),
            attributes.USAGE_OUTPUT_TOKENS: sum(len(c.token_ids) for c in completions),
        }
        children = (
            self.span.child().end(
                "choice",
                {attributes.OPERATION_NAME: self.operation, attributes.CHOICE_INDEX: index}
                | _identity(self, choice)
                | _response_attributes(choice, completion),
            )
            for index, (choice, completion) in enumerate(
                zip(self.choices, completions, strict=True)
            )
        )
        return (*children, self.span.end(self._name, _request_attributes(self) | values))

    def failed(self, reason: str, message: str) -> Span:
        """Return the call's span. `reason` is a short code, and `message` is one sentence."""
        return self.span.fail(self._name, _request_attributes(self), reason, message)

    @property
    def _name(self) -> str:
        return f"{self.operation} {self.policy}"


async def complete(
    call: Call,
    loop: PolicyLoop,
    store: Store | None,
    *,
    on_accept: OnAccept | None = None,
    on_chunk: OnChunk | None = None,
    on_done: OnDone = dict,
) -> tuple[Completion, ...]:
    """Return one completion per choice, once the call is recorded, however it ends.

    If a call has several choices, their tokens go into one child span each. `on_accept` runs once
    the engine has accepted the call. `on_chunk` runs for each piece of text, with the index of its
    choice. `on_done` runs after the last piece, and its result goes into the span. Raise ApiError
    if the call fails.
    """
    try:
        completions = await _generate(call, loop, on_accept, on_chunk)
    except (Exception, asyncio.CancelledError) as error:
        failure = _api_error(error, call)
        if failure is None:
            hung_up = isinstance(error, asyncio.CancelledError | ConnectionError)
            reason = "call_cancelled" if hung_up else "call_error"
            words = str(error) or "the client disconnected before the response was complete"
            await write(store, call.rollout_id, call.failed(reason, words))
            raise
        await write(store, call.rollout_id, call.failed(failure.code, failure.message))
        raise failure from error
    await write(store, call.rollout_id, *call.ended(completions, on_done()))
    return completions


async def write(store: Store | None, rollout_id: str | None, *spans: Span) -> None:
    """Return once the spans are stored. Raise ApiError if they cannot be written."""
    if store is None:
        return
    try:
        await store.in_order(store.add_span, rollout_id, *spans)
    except StoreError as error:
        raise _server_error(
            500, "store_error", f"the call could not be recorded: {error}"
        ) from error


async def _generate(
    call: Call, loop: PolicyLoop, on_accept: OnAccept | None, on_chunk: OnChunk | None
) -> tuple[Completion, ...]:
    """Return the engine's completions. Cancel all generations if anything fails."""
    generations: list[Generation] = []
    try:
        if call.refusal:
            raise call.refusal
        async with asyncio.timeout(call.timeout_s):
            for grammar in {choice.sampling.grammar for choice in call.choices}:
                if grammar is not None:
                    await loop.prepare(grammar, call.rollout_id or "")
            for choice in call.choices:
                generations.append(_submit(loop, choice, call))
            if on_accept:
                await on_accept()
            return tuple(
                await asyncio.gather(
                    *(_follow(i, generation, on_chunk) for i, generation in enumerate(generations))
                )
            )
    except BaseException:
        for generation in generations:
            generation.cancel()
        raise


def _submit(loop: PolicyLoop, choice: Choice, call: Call) -> Generation:
    try:
        return loop.submit(choice.prompt_ids, choice.sampling, call.adapter, call.rollout_id)
    except (PromptTooLong, GrammarError):
        raise
    except ValueError as error:
        raise _Unfit(str(error)) from error


async def _follow(index: int, generation: Generation, on_chunk: OnChunk | None) -> Completion:
    if on_chunk:
        async for chunk in generation:
            await on_chunk(index, chunk)
    completion = await generation.result()
    if completion.finish_reason == "error":
        raise GrammarError(
            "the schema cannot be satisfied (see the server log); pass a smaller schema or remove "
            "its contradictions.",
            "unfinished",
        )
    if completion.finish_reason == "cancelled":
        raise EngineError("the generation was cancelled; send the call again.")
    return completion


def _api_error(error: BaseException, call: Call) -> ApiError | None:
    """Return the error for a failed call, or None if the client is gone or it is our bug."""
    match error:
        case PromptTooLong():
            return ApiError(400, CONTEXT_LENGTH_EXCEEDED, str(error), param="messages")
        case GrammarError():
            param = "tools" if call.guarantees_call else "response_format"
            return ApiError(400, "invalid_schema", str(error), param=param)
        case _Unfit():
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
                f"the call took longer than {call.timeout_s:g} s; raise rollout.call_timeout_s or "
                "ask for fewer tokens.",
            )
        case EngineError() | GrammarProcessLost():
            return _server_error(500, "engine_error", str(error))
    return None


def _server_error(
    status: int, code: str, message: str, retry_after_s: int | None = None
) -> ApiError:
    return ApiError(status, code, message, retry_after_s=retry_after_s, infrastructure=True)


def _request_attributes(call: Call) -> dict[str, Any]:
    first, count = call.choices[0].sampling, len(call.choices)
    prompts = dict.fromkeys(choice.prompt_ids for choice in call.choices)
    return {
        attributes.OPERATION_NAME: call.operation,
        attributes.DIALECT: call.dialect,
        attributes.PROVIDER_NAME: "lightning_jax",
        attributes.REQUEST_MODEL: call.policy,
        attributes.RESPONSE_MODEL: call.served_model,
        attributes.RESPONSE_ID: call.call_id,
        attributes.REQUEST_CHOICE_COUNT: count if count > 1 else None,
        attributes.REQUEST_MAX_TOKENS: first.max_tokens,
        attributes.REQUEST_TOP_P: first.top_p,
        attributes.REQUEST_TOP_K: first.top_k,
        attributes.REQUEST_MIN_P: first.min_p,
        attributes.REQUEST_SEED: first.seed,
        attributes.REQUEST_STOP_SEQUENCES: first.stop or None,
        attributes.AGENT_NAME: call.agent or None,
        attributes.USAGE_INPUT_TOKENS: sum(map(len, prompts)),
        attributes.PREFIX_BREAKS: call.prefix_breaks,
        attributes.ADJUSTED: any(moves_logits(choice.sampling) for choice in call.choices) or None,
        **_identity(call, call.choices[0]),
    }


def _identity(call: Call, choice: Choice) -> dict[str, Any]:
    """Return the attributes that a call's span and the spans of its choices share."""
    return {
        attributes.ROLLOUT_ID: call.rollout_id,
        attributes.AGENT: call.agent,
        attributes.POLICY: call.policy,
        attributes.PROMPT_TOKEN_IDS: choice.prompt_ids,
        attributes.REQUEST_TEMPERATURE: choice.sampling.temperature,
        attributes.ROLE: call.role or None,
        attributes.ANSWERED_BY: call.answered_by or None,
    }


def _response_attributes(choice: Choice, completion: Completion) -> dict[str, Any]:
    is_tempered = choice.sampling.temperature not in (0.0, 1.0)
    return {
        attributes.FORCED: completion.forced if any(completion.forced) else None,
        attributes.TEMPERED_LOGPROBS: completion.tempered_logprobs if is_tempered else None,
        attributes.RESPONSE_FINISH_REASONS: (completion.finish_reason,),
        attributes.USAGE_OUTPUT_TOKENS: len(completion.token_ids),
        attributes.RESPONSE_TOKEN_IDS: completion.token_ids,
        attributes.BEHAVIOR_LOGPROBS: completion.behavior_logprobs,
        attributes.SAMPLING_LOGPROBS: completion.sampling_logprobs,
        attributes.POLICY_VERSIONS: completion.policy_versions,
    }
