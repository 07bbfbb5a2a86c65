"""Ollama's chat and generate APIs.

Its calls have no ids, so the gateway recognizes them by names and arguments. If a request has no
sampling options, the policy's own distribution is sampled, without Ollama's narrower defaults.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from lightning_jax.engine.types import MAX_TOP_LOGPROBS
from lightning_jax.gateway import fields
from lightning_jax.gateway.answer import Answer, Delta
from lightning_jax.gateway.dialects.base import (
    NDJSON,
    Dialect,
    Event,
    Listing,
    MakeReply,
    ReplyContext,
    Sender,
)
from lightning_jax.gateway.dialects.messages import add_assistant, arguments_of, tool_call
from lightning_jax.gateway.dialects.openai_fields import functions_of, logprob_entries
from lightning_jax.gateway.errors import ApiError, invalid
from lightning_jax.gateway.request import POLICY, JsonSchema, PolicyRequest, agent_of, check_model
from lightning_jax.types import Message

_VERSION = "0.12.11"  # the release whose API this follows, the first with log-probabilities
# Fields that no text policy can support, each with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "images": ([],),
    "suffix": ("",),
    "template": ("",),
    "think": (False,),
    "width": (0,),
    "height": (0,),
    "steps": (0,),
}
_KNOWN = {
    *("model", "messages", "prompt", "system", "raw", "stream", "format", "options", "tools"),
    *("logprobs", "top_logprobs", "keep_alive", "context"),
    *_UNSUPPORTED,
}
_UNSUPPORTED_OPTIONS: dict[str, tuple[Any, ...]] = {
    "repeat_penalty": (1, 0),
    "mirostat": (0,),
    "tfs_z": (1,),
    "typical_p": (1,),
}
_KNOWN_OPTIONS = {
    *("temperature", "top_p", "top_k", "min_p", "seed", "num_predict", "stop"),
    *("presence_penalty", "frequency_penalty", *_UNSUPPORTED_OPTIONS),
    # Options for loading a model, or details of the options above. They change nothing here:
    *("numa", "num_ctx", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all"),
    *("vocab_only", "use_mmap", "use_mlock", "embedding_only", "num_thread", "num_keep"),
    *("repeat_last_n", "mirostat_tau", "mirostat_eta", "penalize_newline"),
}


def parse_chat(body: fields.Body, sender: Sender) -> tuple[PolicyRequest, MakeReply]:
    """Return the request in a chat body. Raise ApiError that names the first invalid field."""
    request = _request(body, sender, messages=_messages(body), functions=functions_of(body))
    return request, lambda context: OllamaReply(request, context, _chat_content)


def parse_generate(body: fields.Body, sender: Sender) -> tuple[PolicyRequest, MakeReply]:
    """Return the request in a generate body. Raise ApiError that names the first invalid field."""
    prompt, system = fields.text(body, "prompt"), fields.text(body, "system")
    if fields.flag(body, "raw"):
        if system:
            raise invalid(
                "system is set but raw is true; leave out one of them.", "system", reason="conflict"
            )
        request = _request(body, sender, prompts=(prompt,))
    else:
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        request = _request(body, sender, messages=tuple(messages))
    return request, lambda context: OllamaReply(request, context, _generate_content)


def _request(body: fields.Body, sender: Sender, **what: Any) -> PolicyRequest:
    fields.refuse_unsupported(body, _UNSUPPORTED)
    fields.warn_unknown("ollama", body, _KNOWN)
    options = fields.field(body, "options", dict, {}, "an object")
    fields.refuse_unsupported(options, _UNSUPPORTED_OPTIONS)
    fields.warn_unknown("ollama options", options, _KNOWN_OPTIONS)
    model = fields.text(body, "model")
    limit = fields.integer(options, "num_predict", -1)
    return PolicyRequest(
        dialect="ollama",
        model=model,
        agent=agent_of(model, sender.accepted, sender.headers),
        output_schema=_output_schema(body.get("format")),
        max_tokens=None if limit in (-1, -2) else limit,  # no limit, or until the context is full
        temperature=fields.number(options, "temperature", 1.0),
        top_p=fields.number(options, "top_p", 1.0),
        top_k=fields.top_k(options),
        min_p=fields.number(options, "min_p", 0.0),
        seed=fields.integer(options, "seed"),
        stop=fields.strings(options, "stop"),
        presence_penalty=fields.number(options, "presence_penalty", 0.0),
        frequency_penalty=fields.number(options, "frequency_penalty", 0.0),
        logprobs=fields.flag(body, "logprobs"),
        top_logprobs=fields.bounded(body, "top_logprobs", 0, 0, MAX_TOP_LOGPROBS),
        stream=fields.flag(body, "stream", True),
        **what,
    )


def _output_schema(form: Any) -> JsonSchema | None:
    if form is None or form == "":
        return None
    if form == "json":
        return {}
    if not isinstance(form, dict):
        raise invalid(
            f"format is {fields.brief(form)}; expected json or a JSON schema.",
            "format",
            reason="wrong_type",
        )
    return form


def _messages(body: fields.Body) -> tuple[Message, ...]:
    messages: list[Message] = []
    for index, message in enumerate(fields.objects(body, "messages")):
        where = f"messages[{index}]"
        content = message.get("content")
        content = "" if content is None else content
        if not isinstance(content, str):
            raise invalid(
                f"{where}.content is {fields.brief(content)}; expected a string.",
                "messages",
                reason="wrong_type",
                key=f"{where}.content",
            )
        if message.get("images"):
            raise invalid(
                f"{where}.images is not supported, because the policy reads only text; leave it "
                "out.",
                "messages",
                reason="not_text",
                key=f"{where}.images",
            )
        match message.get("role"):
            case "assistant":
                add_assistant(messages, content, _calls(message, where))
            case "tool":
                name = message.get("tool_name") or message.get("name")
                named = {"name": name} if isinstance(name, str) else {}
                messages.append({"role": "tool", "content": content, **named})
            case role:  # checked when rendering
                messages.append({"role": role, "content": content})
    return tuple(messages)


def _calls(message: fields.Body, where: str) -> list[Message]:
    found = []
    for index, call in enumerate(fields.objects(message, "tool_calls")):
        at, function = f"{where}.tool_calls[{index}]", call.get("function")
        if not isinstance(function, dict):
            raise invalid(
                f"{at}.function is missing; expected an object.",
                "messages",
                reason="missing",
                key=f"{at}.function",
            )
        arguments = function.get("arguments") or {}
        # An id would be the client's own, so it does not identify a generated call.
        found.append(tool_call(function.get("name"), arguments, None, at, "messages"))
    return found


@dataclass(frozen=True)
class OllamaReply:
    """Lines, or the whole body, for either endpoint. `content` builds the fields of an answer's
    text.
    """

    request: PolicyRequest
    context: ReplyContext
    content: Any  # (text, tool calls) -> fields that contain them

    def body(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        content = self.content(answer.text, _whole_calls(answer))
        return self._line(content | self._logprobs(answer.completion) | self._end(answer))

    def opening(self) -> Iterable[Event]:
        return ()

    def delta(self, delta: Delta) -> Iterable[Event]:
        logprobs = self._logprobs(delta.chunk) if delta.chunk else {}
        if delta.text or logprobs:
            yield Event(self._line(self.content(delta.text, []) | logprobs | {"done": False}))

    def ending(self, answers: Sequence[Answer]) -> Iterable[Event]:
        (answer,) = answers
        if calls := _whole_calls(answer):
            yield Event(self._line(self.content("", calls) | {"done": False}))
        yield Event(self._line(self.content("", []) | self._end(answer)))

    def _line(self, payload: dict[str, Any]) -> dict[str, Any]:
        created = datetime.fromtimestamp(self.context.created, UTC)
        return {"model": self.request.model, "created_at": _rfc3339(created), **payload}

    def _logprobs(self, tokens: Any) -> dict[str, Any]:
        if not self.request.logprobs:
            return {}
        entries = logprob_entries(tokens, self.context.tokenizer, self.request.top_logprobs)
        return {"logprobs": entries}

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


def _whole_calls(answer: Answer) -> list[dict[str, Any]]:
    """Return the calls, without one that the token limit cut off: clients would run it
    incompletely.
    """
    whole = [(call.name, arguments_of(call)) for call in answer.tool_calls]
    return [
        {"function": {"name": name, "arguments": arguments}}
        for name, arguments in whole
        if arguments is not None
    ]


def _rfc3339(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")


def _load(content: dict[str, Any], sign: str) -> Any:
    """Return an answer to requests without `sign`, which only ask to load or unload the model."""

    def answer(body: fields.Body, sender: Sender) -> dict[str, Any] | None:
        if body.get(sign) not in (None, "", []):
            return None
        model = fields.text(body, "model")
        check_model(model, sender.accepted)
        now, unload = _rfc3339(datetime.now(UTC)), body.get("keep_alive") in (0, "0", "0s")
        end = {"done": True, "done_reason": "unload" if unload else "load"}
        return {"model": model, "created_at": now, **content, **end}

    return answer


def _tags(body: fields.Body, sender: Sender) -> Any:
    names = [f"{name}:latest" for name in sender.model_names]
    return {"models": [{"name": name, "model": name, "details": _DETAILS} for name in names]}


def _running(body: fields.Body, sender: Sender) -> Any:
    models = [model | {"context_length": sender.max_len} for model in _tags(body, sender)["models"]]
    return {"models": models}


def _show(body: fields.Body, sender: Sender) -> Any:
    check_model(fields.text(body, "model") or fields.text(body, "name"), sender.accepted)
    shape = {"general.architecture": POLICY, f"{POLICY}.context_length": sender.max_len}
    return {"details": _DETAILS, "model_info": shape, "capabilities": ["completion", "tools"]}


def _version(body: fields.Body, sender: Sender) -> Any:
    return {"version": _VERSION}


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


def _error_event(error: ApiError) -> Event:
    return Event(_error(error))


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
        Listing("GET", "/api/version", _version),
    ),
    error=_error,
    error_event=_error_event,
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
    error_event=_error_event,
    names=_NAMES,
    open_in_rollouts=True,
)
