"""Ollama's chat and generate APIs.

Its calls have no ids, so the gateway recognizes them by names and arguments. If a request has no
sampling options, the policy's own distribution is sampled, without Ollama's narrower defaults.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from lightning_jax.engine.response import Chunk
from lightning_jax.engine.types import Completion
from lightning_jax.gateway import fields
from lightning_jax.gateway.answer import Answer, Delta
from lightning_jax.gateway.dialects.base import (
    NDJSON,
    Dialect,
    Event,
    Listing,
    Reply,
    Sender,
    add_assistant,
    to_request,
    tool_call,
    whole_calls,
)
from lightning_jax.gateway.dialects.left_out import sentence
from lightning_jax.gateway.dialects.openai_fields import Tools, functions_of
from lightning_jax.gateway.dialects.unknown_fields import check_unknown
from lightning_jax.gateway.errors import ApiError, invalid
from lightning_jax.gateway.request import (
    MAX_MESSAGES,
    NO_THINKING,
    POLICY,
    JsonSchema,
    PolicyRequest,
    check_model,
)
from lightning_jax.types import Message

_VERSION = "0.12.11"  # the release whose API this follows, the first with log-probabilities
_IGNORED = {"messages", "tools", "prompt", "system", "raw", "keep_alive", "context"}
# Options for loading a model, or details of other options. They change nothing here.
_IGNORED_OPTIONS = {
    *("numa", "num_ctx", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all"),
    *("vocab_only", "use_mmap", "use_mlock", "embedding_only", "num_thread", "num_keep"),
    *("repeat_last_n", "mirostat_tau", "mirostat_eta", "penalize_newline"),
}


class Options(fields.SamplingFields, extra="allow"):
    """Sampling options."""

    min_p: fields.Number | None = None
    stop: fields.Strings | None = None
    max_tokens: fields.Integer | None = Field(None, alias="num_predict")
    repeat_penalty: Annotated[Any, fields.harmless(1, 0)] = None
    mirostat: Annotated[Any, fields.harmless(0)] = None
    tfs_z: Annotated[Any, fields.harmless(1)] = None
    typical_p: Annotated[Any, fields.harmless(1)] = None


class OllamaBody(fields.Fields, extra="allow"):
    """Fields of both endpoints."""

    model: str | None = None
    stream: bool | None = None
    format: Literal["", "json"] | JsonSchema | None = None
    options: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: fields.TopLogprobs | None = None
    images: Annotated[Any, fields.harmless([])] = None
    suffix: Annotated[Any, fields.harmless("")] = None
    template: Annotated[Any, fields.harmless("")] = None
    think: Annotated[Any, fields.harmless(False)] = None
    width: Annotated[Any, fields.harmless(0)] = None
    height: Annotated[Any, fields.harmless(0)] = None
    steps: Annotated[Any, fields.harmless(0)] = None


class CalledFunction(fields.Fields):
    name: fields.Name
    arguments: fields.Arguments = Field({})


class ToolCall(fields.Fields):
    function: CalledFunction


class ChatMessage(fields.Fields):
    role: Any = None  # checked when rendering
    content: str | None = None
    thinking: str | None = None  # of another model: the policy returns its own as text
    images: Any = None
    tool_calls: fields.Listed[ToolCall] | None = None
    tool_name: Any = None
    name: Any = None

    @field_validator("images")
    @classmethod
    def _check(cls, images: Any, info: Any) -> list[Any]:
        """Return the pictures, which only results of tools may have."""
        if not images or info.data.get("role") == "tool":
            return images if isinstance(images, list) else []
        raise PydanticCustomError("unsupported", "leave it out, because it is not supported")


class ChatBody(OllamaBody):
    messages: Annotated[fields.Listed[ChatMessage], Field(max_length=MAX_MESSAGES)] | None = None
    tools: Tools | None = None


class GenerateBody(OllamaBody):
    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None


def parse_chat(body: fields.Body, sender: Sender) -> Reply:
    """Return the reply to a chat body. Raise ApiError that names the first invalid field."""
    chat = ChatBody.read(body)
    messages, functions = _messages(chat.messages or ()), functions_of(chat.tools)
    left_out = tuple("image" for turn in chat.messages or () for _ in turn.images or ())
    request = _request(chat, sender, messages=messages, functions=functions, left_out=left_out)
    return OllamaReply(request, _chat_content)


def parse_generate(body: fields.Body, sender: Sender) -> Reply:
    """Return the reply to a generate body. Raise ApiError that names the first invalid field."""
    payload = GenerateBody.read(body)
    if payload.raw and payload.system:
        raise invalid(
            "system is set but raw is true; leave out one of them.", "system", reason="conflict"
        )
    if payload.raw:
        request = _request(payload, sender, prompts=(payload.prompt or "",))
    else:
        messages = [{"role": "system", "content": payload.system}] if payload.system else []
        messages.append({"role": "user", "content": payload.prompt or ""})
        request = _request(payload, sender, messages=tuple(messages))
    return OllamaReply(request, _generate_content)


def _request(body: OllamaBody, sender: Sender, **more: Any) -> PolicyRequest:
    check_unknown("ollama", body.model_extra, _IGNORED)
    options = Options.read(body.options or {})
    check_unknown("ollama options", options.model_extra, _IGNORED_OPTIONS)
    if options.max_tokens in (-1, -2):  # no limit, or until the context is full
        options.max_tokens = None
    formats: dict[Any, JsonSchema | None] = {None: None, "": None, "json": {}}
    schema = body.format if isinstance(body.format, dict) else formats[body.format]
    more["stream"] = body.stream is not False
    more["chat_template_kwargs"] = NO_THINKING if body.think is False else None
    return to_request("ollama", options, sender, **vars(body) | more, output_schema=schema)


def _messages(turns: Iterable[ChatMessage]) -> tuple[Message, ...]:
    messages: list[Message] = []
    for turn in turns:
        content, name = turn.content or "", turn.tool_name or turn.name
        match turn.role:
            case "assistant":
                # An id would be the client's own, so it does not identify a generated call.
                called = [call.function for call in turn.tool_calls or ()]
                calls = [tool_call(call.name, call.arguments, None) for call in called]
                add_assistant(messages, content, calls, turn.thinking or "")
            case "tool":
                named = {"name": name} if isinstance(name, str) else {}
                texts = filter(None, (content, *(sentence("image") for _ in turn.images or ())))
                messages.append({"role": "tool", "content": "\n".join(texts), **named})
            case role:
                messages.append({"role": role, "content": content})
    return tuple(messages)


@dataclass
class OllamaReply(Reply):
    """Lines, or the whole body, for either endpoint. `content` builds the fields of an answer's
    text.
    """

    content: Callable[[str, list[Any]], dict[str, Any]]  # fields with a text and tool calls

    def body(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        content = self.content(answer.text, _called(answer))
        return self._line(content | self._logprobs(answer.completion) | self._end(answer))

    def delta(self, delta: Delta) -> Iterable[Event]:
        logprobs = self._logprobs(delta.chunk) if delta.chunk else {}
        if delta.text or logprobs:
            yield self._line(self.content(delta.text, []) | logprobs | {"done": False})

    def keep_alive(self) -> Iterable[Event]:
        yield self._line(self.content("", []) | {"done": False})

    def ending(self, answers: Sequence[Answer]) -> Iterable[Event]:
        (answer,) = answers
        if calls := _called(answer):
            yield self._line(self.content("", calls) | {"done": False})
        yield self._line(self.content("", []) | self._end(answer))

    def _line(self, payload: dict[str, Any]) -> dict[str, Any]:
        created = datetime.fromtimestamp(self.context.created, UTC)
        return {"model": self.request.model, "created_at": _rfc3339(created), **payload}

    def _logprobs(self, tokens: Completion | Chunk) -> dict[str, Any]:
        return {"logprobs": self.entries(0, tokens)} if self.request.logprobs else {}

    def _end(self, answer: Answer) -> dict[str, Any]:
        clock = answer.clock
        return {
            "done": True,
            "done_reason": "length" if answer.finish_reason == "length" else "stop",
            "total_duration": clock.ended_ns - clock.started_ns,
            "load_duration": 0,  # the policy is always loaded
            "prompt_eval_count": self.context.prompt_tokens(),
            "prompt_eval_duration": clock.first_token_ns - clock.started_ns,
            "eval_count": len(answer.completion.token_ids),
            "eval_duration": clock.ended_ns - clock.first_token_ns,
        }


def _chat_content(text: str, calls: list[Any]) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {"message": message | ({"tool_calls": calls} if calls else {})}


def _generate_content(text: str, calls: list[Any]) -> dict[str, Any]:
    return {"response": text}


def _called(answer: Answer) -> list[dict[str, Any]]:
    return [
        {"function": {"name": call.name, "arguments": arguments}}
        for call, arguments in whole_calls(answer)
    ]


def _rfc3339(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")


def _load(content: dict[str, Any], sign: str) -> Any:
    """Return an answer to requests without `sign`, which only ask to load or unload the model."""

    def answer(body: fields.Body, sender: Sender) -> dict[str, Any] | None:
        if body.get(sign) not in (None, "", []):
            return None
        model = OllamaBody.read(body).model or ""
        check_model(model, sender.accepted)
        now, unload = _rfc3339(datetime.now(UTC)), body.get("keep_alive") in (0, "0", "0s")
        end = {"done": True, "done_reason": "unload" if unload else "load"}
        return {"model": model, "created_at": now, **content, **end}

    return answer


class ShowBody(fields.Fields):
    model: str | None = None
    name: str | None = None


def _tags(body: fields.Body, sender: Sender) -> Any:
    names = [f"{name}:latest" for name in sender.model_names]
    return {"models": [{"name": name, "model": name, "details": _DETAILS} for name in names]}


def _running(body: fields.Body, sender: Sender) -> Any:
    models = [model | {"context_length": sender.max_len} for model in _tags(body, sender)["models"]]
    return {"models": models}


def _show(body: fields.Body, sender: Sender) -> Any:
    payload = ShowBody.read(body)
    check_model(payload.model or payload.name or "", sender.accepted)
    shape = {"general.architecture": POLICY, f"{POLICY}.context_length": sender.max_len}
    return {"details": _DETAILS, "model_info": shape, "capabilities": ["completion", "tools"]}


# Details of a weights file, which the policy does not have.
_DETAILS: Mapping[str, Any] = {
    "parent_model": "",
    "format": "",
    "family": "",
    "families": None,
    "parameter_size": "",
    "quantization_level": "",
}


def _error(error: ApiError) -> dict[str, str]:
    return {"error": error.message}


_NAMES = {"max_tokens": "num_predict"}

OLLAMA_CHAT = Dialect(
    name="ollama",
    paths=("/api/chat",),
    parse=parse_chat,
    framing=NDJSON,
    at_once=_load(_chat_content("", []), "messages"),
    listings=(
        Listing("GET", "/api/tags", _tags),
        Listing("GET", "/api/ps", _running),
        Listing("POST", "/api/show", _show),
        Listing("GET", "/api/version", lambda body, sender: {"version": _VERSION}),
    ),
    error=_error,
    names=_NAMES,
    open_in_rollouts=True,
)
OLLAMA_GENERATE = Dialect(
    name="ollama",
    paths=("/api/generate",),
    parse=parse_generate,
    framing=NDJSON,
    at_once=_load(_generate_content("", []), "prompt"),
    error=_error,
    names=_NAMES,
    open_in_rollouts=True,
)
