"""What a dialect is: a wire format that translates to one internal request and back.

A dialect's file holds no engine, no tracing and no HTTP server: `parse` makes a PolicyRequest of a
JSON body, and the Reply it returns makes bodies or stream events of Answers and Deltas.
"""

import glob
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lightning_jax.gateway.answer import Answer, Delta
from lightning_jax.gateway.conversations import SavedConversations
from lightning_jax.gateway.errors import ApiError
from lightning_jax.gateway.fields import Body
from lightning_jax.gateway.request import POLICY, PolicyRequest
from lightning_jax.models.tokenizer import Tokenizer


def _no_policy(request: PolicyRequest) -> int:
    raise AssertionError("this Sender was made without a policy")


@dataclass(frozen=True)
class Sender:
    """What a request says besides its body."""

    headers: Mapping[str, str]
    path: Mapping[str, str]  # the variable parts of the URL, such as the model's name
    query: Mapping[str, str]
    model_name: str  # the model that is served
    conversations: SavedConversations  # for dialects that go on from an earlier response by its id
    max_len: int = 0  # tokens that a prompt and its response may have together
    # Tokens of a request's prompt, for dialects that tell before they answer. Raises ApiError.
    count_tokens: Callable[[PolicyRequest], int] = _no_policy
    other_models: tuple[str, ...] = ()  # patterns of names that roles give a meaning
    policies: tuple[str, ...] = ()  # names of several policies

    @property
    def accepted(self) -> tuple[str, ...]:
        """Patterns of what a request may name besides the policy and its agents."""
        return (*self.policies, glob.escape(self.model_name), *self.other_models)

    @property
    def model_names(self) -> tuple[str, ...]:
        """What a request may name, as a listing shows it."""
        return tuple(dict.fromkeys((*self.policies, POLICY, self.model_name)))


@dataclass(frozen=True)
class ReplyContext:
    """What a reply needs to know that its request did not say."""

    token: str  # random; a response's id is `PolicyRequest.id_prefix` and this
    created: int  # seconds since the epoch
    prompt_ids: tuple[tuple[int, ...], ...]  # of each choice
    tokenizer: Tokenizer
    num_choices: int = 1  # of each prompt, next to each other

    def prompt_tokens(self) -> int:
        """Tokens of the prompts, each prompt once however many choices it has."""
        return sum(map(len, self.prompt_ids[:: self.num_choices]))


@dataclass(frozen=True)
class Event:
    """One event of a stream; a name only where the dialect names its events."""

    data: Any
    name: str = ""


class Reply(Protocol):
    """Answers in a dialect's terms."""

    def body(self, answers: Sequence[Answer]) -> Any:
        """The whole answer, as JSON."""
        ...

    def opening(self) -> Iterable[Event]:
        """The events before the first token."""
        ...

    def delta(self, delta: Delta) -> Iterable[Event]:
        """The events for what newly came; none where the client would learn nothing."""
        ...

    def ending(self, answers: Sequence[Answer]) -> Iterable[Event]:
        """The events after the last token."""
        ...


MakeReply = Callable[[ReplyContext], Reply]


@dataclass(frozen=True)
class Framing:
    """How events become bytes."""

    content_type: str
    frame: Callable[[Event], bytes]
    end: bytes = b""  # after the last event of a stream that was not cut
    begin: bytes = b""  # before the first event
    between: bytes = b""  # before every other one
    close: bytes = b""  # after the last event, an error too
    numbered: bool = False  # every event says its place in the stream, as `sequence_number`


def sse(event: Event) -> bytes:
    """Server-sent events."""
    name = f"event: {event.name}\n" if event.name else ""
    return f"{name}data: {json.dumps(event.data)}\n\n".encode()


def ndjson(event: Event) -> bytes:
    """One JSON object a line."""
    return json.dumps(event.data).encode() + b"\n"


SSE = Framing("text/event-stream", sse)
OPENAI_SSE = Framing("text/event-stream", sse, b"data: [DONE]\n\n")
NDJSON = Framing("application/x-ndjson", ndjson)
JSON_ARRAY = Framing("application/json", ndjson, begin=b"[", between=b",", close=b"]")


@dataclass(frozen=True)
class Listing:
    """A request that no policy answers: for what is served, or what was answered before."""

    method: str
    path: str
    answer: Callable[[Body, Sender], Any]  # the request's JSON body, {} without one
    header: str = ""  # that its clients send, where several dialects list at one path


def openai_error(error: ApiError) -> Any:
    return error.body


def openai_error_event(error: ApiError) -> Event:
    return Event(error.body)


@dataclass(frozen=True)
class Dialect:
    """One wire format. `paths` may have variable parts as aiohttp writes them."""

    name: str
    paths: tuple[str, ...]
    parse: Callable[[Body, Sender], tuple[PolicyRequest, MakeReply]]
    framing: Framing = OPENAI_SSE
    framings: Mapping[str, Framing] = field(default_factory=dict)  # others, by the query's `alt`
    # What needs no policy: the body to answer with at once, None for every other request.
    at_once: Callable[[Body, Sender], Any] | None = None
    listings: tuple[Listing, ...] = ()
    error: Callable[[ApiError], Any] = openai_error  # the body of a refused call
    error_event: Callable[[ApiError], Event] = openai_error_event  # the end of a broken stream
    # What it calls a field of PolicyRequest or SamplingParams, where otherwise.
    names: Mapping[str, str] = field(default_factory=dict)
    open_in_rollouts: bool = False  # its clients send no key: a rollout's unguessable URL is enough
