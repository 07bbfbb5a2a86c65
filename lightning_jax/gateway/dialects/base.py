"""Interface of a dialect: a wire format that translates to one internal request and back.

A dialect's file contains no engine, no tracing and no HTTP server. Its `parse` turns a JSON body
into a Reply with a PolicyRequest. The Reply turns Answers and Deltas into bodies or stream events.
"""

import glob
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from operator import attrgetter
from typing import Any, ClassVar, Self

from lightning_jax.engine.response import Chunk
from lightning_jax.engine.types import Completion
from lightning_jax.gateway.answer import Answer, Delta, ToolCall, function_call
from lightning_jax.gateway.dialects.saved_responses import SavedConversations
from lightning_jax.gateway.errors import ApiError
from lightning_jax.gateway.fields import Body, Fields
from lightning_jax.gateway.request import POLICY, PolicyRequest, check_model, named_agent
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.types import Message

MIN_LOGPROB = -9999.0  # JSON has no minus infinity
BYTES_PER_TOKEN = 16  # approximate size of a token or an alternative in an answer
_literal = cache(glob.escape)


def _no_policy(request: PolicyRequest) -> int:
    raise AssertionError("this Sender was made without a policy")


@dataclass(frozen=True)
class Sender:
    """Context of a request in addition to its body."""

    headers: Mapping[str, str]
    path: Mapping[str, str]  # variable parts of the URL, such as the model name
    query: Mapping[str, str]
    model_name: str  # name of the served model
    conversations: SavedConversations  # for dialects that continue an earlier response by its id
    max_len: int = 0  # maximum number of tokens in a prompt and its response together
    # Counts the tokens of a request's prompt, for dialects that offer it. May raise ApiError.
    count_tokens: Callable[[PolicyRequest], int] = _no_policy
    other_models: tuple[str, ...] = ()  # patterns of model names that roles match
    policies: tuple[str, ...] = ()  # names, if there are several policies
    accepts_any_model: bool = False  # the policy also answers for unknown names

    @property
    def known(self) -> tuple[str, ...]:
        """Patterns of known model names other than the policy and its agents."""
        return (*self.policies, _literal(self.model_name), *self.other_models)

    @property
    def accepted(self) -> tuple[str, ...]:
        """Patterns of accepted model names other than the policy and its agents."""
        return (*self.known, "*") if self.accepts_any_model else self.known

    @property
    def model_names(self) -> tuple[str, ...]:
        """Accepted model names, as a listing shows them."""
        return tuple(dict.fromkeys((*self.policies, POLICY, self.model_name)))


def to_request(dialect: str, fields: Fields, sender: Sender, **more: Any) -> PolicyRequest:
    """Return a request with more fields, and with those that have the same names in it.

    A field that is None gets its default. Raise ApiError if the request is invalid.
    """
    values = {**vars(fields), **more}
    names = PolicyRequest.__dataclass_fields__
    common = {name: value for name in names if (value := values.get(name)) is not None}
    model = common.setdefault("model", "")
    check_model(model, sender.accepted)
    agent = named_agent(model, sender.headers, values.get("metadata"))
    return PolicyRequest(dialect=dialect, agent=agent, **common)


@dataclass(frozen=True)
class ReplyContext:
    """Context of a reply that is not part of its request."""

    token: str  # random; a response's id is `PolicyRequest.id_prefix` plus this
    created: int  # seconds since the epoch
    prompt_ids: tuple[tuple[int, ...], ...]  # of each choice
    tokenizer: Tokenizer
    num_choices: int = 1  # for each prompt; choices of one prompt are adjacent

    def prompt_tokens(self) -> int:
        """Return the number of prompt tokens, counting each prompt once for all its choices."""
        return sum(map(len, self.prompt_ids[:: self.num_choices]))


@dataclass
class TokenEntries:
    """Writer of one entry per token of a choice, whose tokens come in order.

    The log-probabilities are those of the policy at temperature 1. With `as_ids`, a token is named
    by its id. Names are unique and do not depend on a token's place. `bytes` are those that the
    token adds to the choice's text there, so they join to it: none for a hidden special token, and
    no blank that the vocabulary drops at the start of a text.
    """

    tokenizer: Tokenizer
    top: int
    as_ids: bool = False
    is_start: bool = True  # no token has added to the text yet

    def write(self, tokens: Completion | Chunk) -> list[dict[str, Any]]:
        """Return the entries of the next tokens."""
        entries = []
        alternatives = tokens.top_logprobs or ((),) * len(tokens.token_ids)
        for token_id, logprob, others in zip(
            tokens.token_ids, tokens.behavior_logprobs, alternatives, strict=True
        ):
            best = [self._entry(i, value) for i, value in others[: self.top]]
            entries.append({**self._entry(token_id, logprob), "top_logprobs": best})
            self.is_start = self.is_start and token_id in self._hidden_ids
        return entries

    @cached_property
    def _hidden_ids(self) -> frozenset[int]:
        return self.tokenizer.special_ids | self.tokenizer.eos_ids

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        pieces, is_hidden = self.tokenizer.pieces, token_id in self._hidden_ids
        added = pieces.at_start(token_id) if self.is_start else pieces.of(token_id)
        return {
            "token": f"token_id:{token_id}" if self.as_ids else pieces.name(token_id),
            "logprob": max(logprob, MIN_LOGPROB),
            "bytes": [] if is_hidden else list(added),
        }


Event = dict[str, Any]  # JSON object in a stream


@dataclass
class Reply(ABC):
    """Reply to a request: conversion of answers to a dialect's format."""

    repeats_request: ClassVar[bool] = False  # True if the body has fields of the request

    request: PolicyRequest
    context: ReplyContext = field(init=False)  # once the call was accepted
    _entries: dict[int, TokenEntries] = field(default_factory=dict, init=False)  # by choice

    def begin(self, context: ReplyContext) -> Self:
        """Return the reply, now that its call was accepted."""
        self.context = context
        return self

    @property
    def response_id(self) -> str:
        return self.request.id_prefix + self.context.token

    def num_tokens(self, answers: Sequence[Answer]) -> tuple[int, int]:
        """Return the numbers of prompt tokens and of sampled tokens."""
        sampled = sum(len(answer.completion.token_ids) for answer in answers)
        return self.context.prompt_tokens(), sampled

    def num_cached(self, answers: Sequence[Answer]) -> int:
        """Return the number of prompt tokens that the prefix cache had for all choices."""
        cached, number = [a.completion.num_cached for a in answers], self.context.num_choices
        return sum(min(cached[i : i + number]) for i in range(0, len(cached), number))

    def num_bytes(self, answers: Sequence[Answer], request_bytes: int) -> int:
        """Return the approximate size of the token data in a body with these answers.

        If the body repeats the request, add the request's size.
        """
        request = self.request
        shows_prompt = request.prompts is not None or request.return_token_ids
        prompts = self.context.prompt_ids if shows_prompt else ()
        number = sum(map(len, prompts))
        number += sum(len(answer.completion.token_ids) for answer in answers)
        num_bytes = number * (1 + request.top_logprobs) * BYTES_PER_TOKEN
        return num_bytes + (request_bytes if self.repeats_request else 0)

    def entries(self, choice: int, tokens: Completion | Chunk) -> list[dict[str, Any]]:
        """Return the log-probability entries of the next tokens of a choice."""
        if choice not in self._entries:
            top, as_ids = self.request.top_logprobs, self.request.return_tokens_as_token_ids
            self._entries[choice] = TokenEntries(self.context.tokenizer, top, as_ids)
        return self._entries[choice].write(tokens)

    @abstractmethod
    def body(self, answers: Sequence[Answer]) -> Any:
        """Return the whole answer as JSON."""

    def opening(self) -> Iterable[Event]:
        """Return the events before the first token."""
        return ()

    def keep_alive(self) -> Iterable[Event]:
        """Return events that tell the client only that the call goes on.

        They may come anywhere between the opening and the ending. Return none if the format has
        no event that every client reads past.
        """
        return ()

    @abstractmethod
    def delta(self, delta: Delta) -> Iterable[Event]:
        """Return the events for a delta, or none if they would tell the client nothing."""

    @abstractmethod
    def ending(self, answers: Sequence[Answer]) -> Iterable[Event]:
        """Return the events after the last token."""


Dump = Callable[[Any], str]  # json.dumps, or another function with the same result


@dataclass(frozen=True)
class Framing:
    """Encoding of events as bytes."""

    content_type: str
    frame: Callable[[Event, Dump], bytes]
    end: bytes = b""  # after the last event of a complete stream
    begin: bytes = b""  # before the first event
    between: bytes = b""  # before every other event
    close: bytes = b""  # after the last event, even an error
    numbered: bool = False  # every event carries its index in the stream as `sequence_number`


def sse(event: Event, dump: Dump) -> bytes:
    """Encode an event as a server-sent event."""
    return f"data: {dump(event)}\n\n".encode()


def named_sse(event: Event, dump: Dump) -> bytes:
    """Encode an event as a server-sent event with its type as its name."""
    return f"event: {event['type']}\ndata: {dump(event)}\n\n".encode()


def ndjson(event: Event, dump: Dump) -> bytes:
    """Encode an event as a line of JSON."""
    return dump(event).encode() + b"\n"


SSE = Framing("text/event-stream", sse)
NAMED_SSE = Framing("text/event-stream", named_sse)
OPENAI_SSE = Framing("text/event-stream", sse, b"data: [DONE]\n\n")
NDJSON = Framing("application/x-ndjson", ndjson)
JSON_ARRAY = Framing("application/json", ndjson, begin=b"[", between=b",", close=b"]")


@dataclass(frozen=True)
class Listing:
    """Request that needs no policy: for served models, or for earlier responses."""

    method: str
    path: str
    answer: Callable[[Body, Sender], Any]  # gets the request's JSON body, or {} without one
    header: str = ""  # sent by its clients, if several dialects share the path


def model_listings(
    path: str,
    entry: Callable[[str, Sender], Any],
    whole: Callable[[list[Any]], Any],
    header: str = "",
) -> tuple[Listing, Listing]:
    """Return the listings of all models and of one, from the entry of a model."""

    def models(body: Body, sender: Sender) -> Any:
        return whole([entry(name, sender) for name in sender.model_names])

    def model(body: Body, sender: Sender) -> Any:
        check_model(sender.path["model"], sender.accepted)
        return entry(sender.path["model"], sender)

    return Listing("GET", path, models, header), Listing(
        "GET", f"{path}/{{model:.+}}", model, header
    )


@dataclass(frozen=True)
class Dialect:
    """One wire format. `paths` may have variable parts in aiohttp's syntax."""

    name: str
    paths: tuple[str, ...]
    parse: Callable[[Body, Sender], Reply]
    framing: Framing = OPENAI_SSE
    framings: Mapping[str, Framing] = field(default_factory=dict)  # others, by the query's `alt`
    # For requests that need no policy: returns the response body, or None for every other request.
    at_once: Callable[[Body, Sender], Any] | None = None
    listings: tuple[Listing, ...] = ()
    error: Callable[[ApiError], Any] = attrgetter("body")  # body of a refused call
    # Last event of a broken stream; None: that body.
    error_event: Callable[[ApiError], Event] | None = None
    # Its names for fields of PolicyRequest or SamplingParams, if different.
    names: Mapping[str, str] = field(default_factory=dict)
    open_in_rollouts: bool = False  # its clients send no key, so a rollout's secret URL is enough


def tool_call(name: str, arguments: dict[str, Any], call_id: str | None) -> Message:
    """Return a call in an assistant's message. `call_id` is None if the dialect has none."""
    return function_call(call_id, name, json.dumps(arguments, ensure_ascii=False))


def text_blocks(content: Any) -> Any:
    """Return content as a list of blocks. A string becomes one text block."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def add_assistant(
    messages: list[Message], text: str, calls: Sequence[Message], thought: str = ""
) -> None:
    """Append to the assistant's turn, which may come in pieces, each as a separate message."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    extend_turn(messages[-1], text, calls, thought)


def extend_turn(turn: Message, text: str, calls: Sequence[Message], thought: str) -> None:
    """Append to an assistant's message."""
    turn["content"] += text
    if thought:
        turn["reasoning_content"] = turn.get("reasoning_content", "") + thought
    if calls:
        turn["tool_calls"] = [*turn.get("tool_calls", ()), *calls]


def whole_calls(answer: Answer) -> list[tuple[ToolCall, dict[str, Any]]]:
    """Return the calls with their arguments.

    A call that the token limit cut off is left out: clients would run it incompletely.
    """
    calls = [(call, arguments_of(call)) for call in answer.tool_calls]
    return [(call, arguments) for call, arguments in calls if arguments is not None]


def arguments_of(call: ToolCall) -> dict[str, Any] | None:
    """Return the arguments as an object, or None if the token limit cut them off."""
    try:
        arguments = json.loads(
            call.arguments or "{}", parse_float=_finite, parse_constant=lambda name: None
        )
    except ValueError:
        return None
    return arguments if isinstance(arguments, dict) else None


def _finite(text: str) -> float:
    """Clamp a number such as 1e999, which JSON can write, since JSON cannot write infinity."""
    largest = sys.float_info.max
    return min(max(float(text), -largest), largest)
