"""OpenAI's chat completions API."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_jax.engine.types import MAX_TOP_LOGPROBS
from lightning_jax.gateway import fields
from lightning_jax.gateway.answer import Answer, Delta
from lightning_jax.gateway.dialects.base import (
    Dialect,
    Event,
    Listing,
    MakeReply,
    ReplyContext,
    Sender,
)
from lightning_jax.gateway.dialects.openai_fields import (
    HARMLESS,
    completion_tokens,
    fingerprint,
    functions_of,
    logprob_entries,
    output_schema,
    sampling_fields,
)
from lightning_jax.gateway.errors import invalid
from lightning_jax.gateway.request import (
    MAX_CHOICES,
    PolicyRequest,
    ToolChoice,
    agent_of,
    check_model,
)

# Fields that no text policy can support, each with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "repetition_penalty": (1,),
    "web_search_options": (),
}
_KNOWN = {
    *("messages", "model", "tools", "n", "stop", "seed", "temperature", "top_p", "top_k", "min_p"),
    *("max_tokens", "max_completion_tokens", "stream", "stream_options", "logprobs", "metadata"),
    *("top_logprobs", "logit_bias", "presence_penalty", "frequency_penalty", "response_format"),
    *("tool_choice", "parallel_tool_calls", "return_token_ids", "ignore_eos"),
    *_UNSUPPORTED,
    *HARMLESS,
}


def parse(body: fields.Body, sender: Sender) -> tuple[PolicyRequest, MakeReply]:
    """Return the request in a chat body. Raise ApiError that names the first invalid field."""
    fields.refuse_unsupported(body, _UNSUPPORTED)
    fields.warn_unknown("chat", body, _KNOWN)
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise invalid(
            "messages must be a list of messages.",
            "messages",
            reason="wrong_type",
        )
    model = fields.field(body, "model", str, "", "a model name")
    metadata = fields.field(body, "metadata", dict, {}, "an object")
    stream_options = fields.field(body, "stream_options", dict, {}, "an object")
    include_usage = fields.flag(stream_options, "include_usage")
    limit = fields.integer(body, "max_tokens")
    request = PolicyRequest(
        dialect="chat",
        model=model,
        id_prefix="chatcmpl-",
        agent=agent_of(model, sender.accepted, sender.headers, metadata),
        messages=tuple(messages),
        functions=functions_of(body),
        tool_choice=_tool_choice(body),
        parallel_tool_calls=fields.flag(body, "parallel_tool_calls", True),
        output_schema=_output_schema(body),
        num_choices=fields.bounded(body, "n", 1, 1, MAX_CHOICES),
        max_tokens=fields.integer(body, "max_completion_tokens", limit),
        stop=fields.strings(body, "stop"),
        logprobs=fields.flag(body, "logprobs"),
        top_logprobs=_top_logprobs(body),
        **sampling_fields(body),
    )
    return request, lambda context: ChatReply(request, include_usage, context)


def _top_logprobs(body: fields.Body) -> int:
    number = fields.bounded(body, "top_logprobs", 0, 0, MAX_TOP_LOGPROBS)
    if number and not fields.flag(body, "logprobs"):
        raise invalid(
            f"top_logprobs is {number} but logprobs is not set; set logprobs to true.",
            "top_logprobs",
            reason="needs_logprobs",
        )
    return number


def _tool_choice(body: fields.Body) -> ToolChoice:
    choice = body.get("tool_choice")
    if choice is None:
        return ToolChoice()
    if choice in ("auto", "none", "required"):
        return ToolChoice(choice)
    match choice:
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolChoice("required", (name,))
        case {"type": "allowed_tools", "allowed_tools": {"mode": str(mode), "tools": [*tools]}}:
            names = [name for tool in tools if (name := _named(tool))]
            if mode in ("auto", "required") and len(names) == len(tools):
                return ToolChoice(mode, tuple(names))
    raise invalid(
        f"tool_choice is {fields.brief(choice)}; expected auto, none, required or a function.",
        "tool_choice",
        reason="unknown",
    )


def _named(tool: Any) -> str | None:
    match tool:
        case {"function": {"name": str(name)}}:
            return name
    return None


def _output_schema(body: fields.Body) -> dict[str, Any] | None:
    spec = fields.field(body, "response_format", dict, {}, "an object")
    if spec.get("type") == "json_schema":
        inner = fields.field(spec, "json_schema", dict, {}, "an object")
        spec = {"type": "json_schema", "schema": inner.get("schema")}
    return output_schema(spec, "response_format")


@dataclass(frozen=True)
class ChatReply:
    """Chat completion bodies and chunks."""

    request: PolicyRequest
    include_usage: bool
    context: ReplyContext

    def body(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "refusal": None, **_message(answer)},
                **self._token_fields(answer.completion),
                "finish_reason": answer.finish_reason,
            }
            for index, answer in enumerate(answers)
        ]
        return {
            **self._envelope("chat.completion"),
            "choices": choices,
            "usage": self._usage(answers),
            "system_fingerprint": fingerprint(answers),
            **self._prompt_fields(),
        }

    def opening(self) -> Iterable[Event]:
        for index in range(len(self.context.prompt_ids)):
            delta = {"role": "assistant", "content": ""}
            yield self._chunk([_choice(index, delta)], self._prompt_fields())

    def delta(self, delta: Delta) -> Iterable[Event]:
        wants_tokens = self.request.logprobs or self.request.return_token_ids
        tokens = self._token_fields(delta.chunk) if delta.chunk and wants_tokens else {}
        if delta.text or (tokens and not delta.calls):
            yield self._chunk([_choice(delta.choice, {"content": delta.text}) | tokens])
            tokens = {}
        if delta.calls:
            calls = [_call_delta(call) for call in delta.calls]
            yield self._chunk([_choice(delta.choice, {"tool_calls": calls}) | tokens])

    def ending(self, answers: Sequence[Answer]) -> Iterable[Event]:
        for index, answer in enumerate(answers):
            yield self._chunk([_choice(index, {}, answer.finish_reason)])
        if self.include_usage:
            yield self._chunk([], {"usage": self._usage(answers)})

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.request.id_prefix + self.context.token,
            "object": kind,
            "created": self.context.created,
            "model": self.request.model,
        }

    def _chunk(self, choices: list[dict[str, Any]], extra: dict[str, Any] | None = None) -> Event:
        usage = {"usage": None} if self.include_usage else {}
        envelope = self._envelope("chat.completion.chunk")
        return Event({**envelope, "choices": choices, **usage, **(extra or {})})

    def _prompt_fields(self) -> dict[str, Any]:
        if not self.request.return_token_ids:
            return {}
        return {"prompt_token_ids": list(self.context.prompt_ids[0])}

    def _token_fields(self, tokens: Any) -> dict[str, Any]:
        entries = None
        if self.request.logprobs:
            top = self.request.top_logprobs
            content = logprob_entries(tokens, self.context.tokenizer, top)
            entries = {"content": content, "refusal": None}
        ids = {"token_ids": list(tokens.token_ids)} if self.request.return_token_ids else {}
        return {"logprobs": entries, **ids}

    def _usage(self, answers: Sequence[Answer]) -> dict[str, int]:
        prompt, sampled = self.context.prompt_tokens(), completion_tokens(answers)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
        }


def _message(answer: Answer) -> dict[str, Any]:
    message = answer.as_message()
    if answer.tool_calls:
        message["content"] = message["content"] or None
    return message


def _call_delta(call: Any) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.call_id, "type": "function", "function": function}


def _choice(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _models(body: fields.Body, sender: Sender) -> Any:
    entries = [_model_entry(name) for name in sender.model_names]
    return {"object": "list", "data": entries}


def _model(body: fields.Body, sender: Sender) -> Any:
    check_model(sender.path["model"], sender.accepted)
    return _model_entry(sender.path["model"])


def _model_entry(name: str) -> dict[str, str | int]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "lightning_jax"}


CHAT = Dialect(
    name="chat",
    paths=("/v1/chat/completions",),
    parse=parse,
    listings=(
        Listing("GET", "/v1/models", _models),
        Listing("GET", "/v1/models/{model:.+}", _model),
    ),
)
