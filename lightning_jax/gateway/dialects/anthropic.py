"""Anthropic's messages API."""

from collections.abc import Iterable, Sequence
from typing import Any

from lightning_jax.gateway import fields
from lightning_jax.gateway.answer import Answer, Delta
from lightning_jax.gateway.dialects.base import (
    SSE,
    Dialect,
    Event,
    Listing,
    MakeReply,
    ReplyContext,
    Sender,
)
from lightning_jax.gateway.dialects.messages import add_assistant, arguments_of, tool_call
from lightning_jax.gateway.dialects.openai_fields import completion_tokens, output_schema
from lightning_jax.gateway.errors import ApiError, invalid
from lightning_jax.gateway.request import Function, PolicyRequest, ToolChoice, agent_of, check_model
from lightning_jax.types import Message

# Fields that no text policy can support, each with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {"container": (), "mcp_servers": ([],)}
_KNOWN = {
    *("model", "messages", "system", "max_tokens", "stop_sequences", "stream", "metadata"),
    *("temperature", "top_p", "top_k", "tools", "tool_choice", "output_config", "output_format"),
    # No effect here:
    *("thinking", "service_tier", "cache_control", "context_management", "diagnostics", "betas"),
    *("inference_geo", "speed", "user_profile_id", "workspace_id"),
    *_UNSUPPORTED,
}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def parse(body: fields.Body, sender: Sender) -> tuple[PolicyRequest, MakeReply]:
    """Return the request in a messages body. Raise ApiError that names the first invalid field."""
    max_tokens = fields.integer(body, "max_tokens")
    if max_tokens is None:
        raise invalid(
            "max_tokens is missing; set the maximum number of tokens to generate.",
            "max_tokens",
            reason="missing",
        )
    request = _request(body, sender, max_tokens)
    return request, lambda context: MessagesReply(request, context)


def _count_tokens(body: fields.Body, sender: Sender) -> Any:
    return {"input_tokens": sender.count_tokens(_request(body, sender, None))}


def _request(body: fields.Body, sender: Sender, max_tokens: int | None) -> PolicyRequest:
    fields.refuse_unsupported(body, _UNSUPPORTED)
    fields.warn_unknown("anthropic", body, _KNOWN)
    model = fields.text(body, "model")
    metadata = fields.field(body, "metadata", dict, {}, "an object")
    output = fields.field(body, "output_config", dict, {}, "an object")
    # Field for the format before output_config. Clients of its beta still send it.
    earlier = fields.field(body, "output_format", dict, {}, "an object")
    form = fields.field(output, "format", dict, earlier, "an object")
    choice, parallel = _tool_choice(body)
    return PolicyRequest(
        dialect="anthropic",
        model=model,
        id_prefix="msg_",
        agent=agent_of(model, sender.accepted, sender.headers, metadata),
        messages=_messages(body),
        functions=_functions(body),
        tool_choice=choice,
        parallel_tool_calls=parallel,
        output_schema=output_schema(form, "output_config.format"),
        max_tokens=max_tokens,
        temperature=fields.number(body, "temperature", 1.0),
        top_p=fields.number(body, "top_p", 1.0),
        top_k=fields.top_k(body),
        stop=fields.strings(body, "stop_sequences"),
        stream=fields.flag(body, "stream"),
    )


def _functions(body: fields.Body) -> tuple[Function, ...]:
    found = []
    for index, tool in enumerate(fields.objects(body, "tools")):
        where = f"tools[{index}]"
        if tool.get("type") not in (None, "custom"):
            raise invalid(
                f"{where}.type is {fields.brief(tool['type'])}, a hosted tool that this server "
                "does not provide; pass a client tool with an input_schema.",
                "tools",
                reason="unsupported",
                key=f"{where}.type",
            )
        name, schema = tool.get("name"), tool.get("input_schema")
        if not isinstance(name, str) or not name:
            raise invalid(
                f"{where}.name is {fields.brief(name)}; expected a name.",
                "tools",
                reason="wrong_type",
                key=f"{where}.name",
            )
        if not isinstance(schema, dict):
            raise invalid(
                f"{where}.input_schema is not an object; expected a JSON schema.",
                "tools",
                reason="wrong_type",
                key=f"{where}.input_schema",
            )
        found.append(Function(name, fields.text(tool, "description"), schema))
    return tuple(found)


def _tool_choice(body: fields.Body) -> tuple[ToolChoice, bool]:
    """Return the tool choice, and whether one answer may contain several calls."""
    choice = fields.field(body, "tool_choice", dict, {}, "an object")
    parallel = not fields.flag(choice, "disable_parallel_tool_use")
    match choice.get("type", "auto"), choice.get("name"):
        case "auto", _:
            return ToolChoice(), parallel
        case "any", _:
            return ToolChoice("required"), parallel
        case "none", _:
            return ToolChoice("none"), parallel
        case "tool", str(name):
            return ToolChoice("required", (name,)), parallel
    raise invalid(
        f"tool_choice is {fields.brief(choice)}; expected type auto, any, none, or tool with a "
        "tool name.",
        "tool_choice",
        reason="unknown",
    )


def _messages(body: fields.Body) -> tuple[Message, ...]:
    if not isinstance(body.get("messages"), list):
        raise invalid(
            "messages must be a list of messages.",
            "messages",
            reason="wrong_type",
        )
    messages: list[Message] = []
    if body.get("system"):
        messages.append({"role": "system", "content": _text(body["system"], "system", "system")})
    for index, message in enumerate(fields.objects(body, "messages")):
        where = f"messages[{index}]"
        role, blocks = message.get("role"), _blocks(message.get("content"), f"{where}.content")
        match role:
            case "assistant":
                _add_assistant(messages, blocks, f"{where}.content")
            case "user" | "system":
                _add_input(messages, role, blocks, f"{where}.content")
            case _:
                raise invalid(
                    f"{where}.role is {fields.brief(role)}; expected user or assistant.",
                    "messages",
                    reason="unknown",
                    key=f"{where}.role",
                )
    if messages and messages[-1]["role"] == "assistant":
        raise invalid(
            "messages ends with an assistant message, and continuing it is not supported; end with "
            "a user message.",
            "messages",
            reason="ends_with_assistant",
        )
    return tuple(messages)


def _blocks(content: Any, where: str, param: str = "messages") -> list[fields.Body]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if isinstance(content, list) and all(isinstance(block, dict) for block in content):
        return content
    raise invalid(
        f"{where} is {fields.brief(content)}; expected a string or a list of content blocks.",
        param,
        reason="wrong_type",
        key=where,
    )


def _add_assistant(messages: list[Message], blocks: list[fields.Body], where: str) -> None:
    text, calls = "", []
    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        match block.get("type"):
            case "tool_use":
                call_id = _string(block, "id", at)
                call = tool_call(block.get("name"), block.get("input"), call_id, at, "messages")
                calls.append(call)
            case "thinking" | "redacted_thinking":
                pass  # from another model: the policy returns none
            case _:
                text += _block_text(block, at)
    add_assistant(messages, text, calls)


def _add_input(messages: list[Message], role: str, blocks: list[fields.Body], where: str) -> None:
    """Append tool results as separate messages, and adjacent texts as one message."""
    texts: list[str] = []
    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        if block.get("type") != "tool_result":
            texts.append(_block_text(block, at))
            continue
        if texts:
            messages.append({"role": role, "content": "\n".join(texts)})
            texts = []
        messages.append(_tool_result(block, at))
    if texts or not blocks:
        messages.append({"role": role, "content": "\n".join(texts)})


def _tool_result(block: fields.Body, where: str) -> Message:
    text = _text(block.get("content") or "", f"{where}.content")
    if fields.flag(block, "is_error") and not text.lower().startswith("error"):
        text = f"Error: {text}"  # a chat template has no other place for the error
    return {"role": "tool", "tool_call_id": _string(block, "tool_use_id", where), "content": text}


def _text(content: Any, where: str, param: str = "messages") -> str:
    blocks = enumerate(_blocks(content, where, param))
    return "\n".join(_block_text(block, f"{where}[{index}]", param) for index, block in blocks)


def _block_text(block: fields.Body, where: str, param: str = "messages") -> str:
    if block.get("type") != "text":
        raise invalid(
            f"{where} is of type {fields.brief(block.get('type'))}, and the policy reads only "
            "text; expected text, tool_use or tool_result.",
            param,
            reason="not_text",
            key=where,
        )
    return _string(block, "text", where, param)


def _string(block: fields.Body, name: str, where: str, param: str = "messages") -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise invalid(
            f"{where}.{name} is {fields.brief(value)}; expected a string.",
            param,
            reason="wrong_type",
            key=f"{where}.{name}",
        )
    return value


class MessagesReply:
    """Message bodies and events. Only one block of a stream is open at a time."""

    def __init__(self, request: PolicyRequest, context: ReplyContext) -> None:
        self._request = request
        self._context = context
        self._index = -1  # index of the newest block
        self._open = ""  # type of the newest block, "" once it is closed

    def body(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        content: list[dict[str, Any]] = []
        if answer.text:
            content.append({"type": "text", "text": answer.text})
        for call in answer.tool_calls:
            use = {"type": "tool_use", "id": call.call_id, "name": call.name}
            content.append({**use, "input": arguments_of(call) or {}})
        return self._message(content, self._stop(answer), completion_tokens(answers))

    def opening(self) -> Iterable[Event]:
        message = self._message([], {"stop_reason": None, "stop_sequence": None}, 0)
        yield _event({"type": "message_start", "message": message})

    def delta(self, delta: Delta) -> Iterable[Event]:
        if delta.text:
            if self._open != "text":
                yield from self._begin({"type": "text", "text": ""})
            yield self._more({"type": "text_delta", "text": delta.text})
        for call in delta.calls:
            if call.name is not None:
                use = {"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}}
                yield from self._begin(use)
            if call.arguments:
                yield self._more({"type": "input_json_delta", "partial_json": call.arguments})

    def ending(self, answers: Sequence[Answer]) -> Iterable[Event]:
        yield from self._end()
        usage = {"output_tokens": completion_tokens(answers)}
        yield _event({"type": "message_delta", "delta": self._stop(answers[0]), "usage": usage})
        yield _event({"type": "message_stop"})

    def _message(self, content: list[Any], stop: dict[str, Any], sampled: int) -> dict[str, Any]:
        return {
            "id": self._request.id_prefix + self._context.token,
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": content,
            **stop,
            "usage": {"input_tokens": self._context.prompt_tokens(), "output_tokens": sampled},
        }

    def _begin(self, block: dict[str, Any]) -> Iterable[Event]:
        yield from self._end()
        self._index += 1
        self._open = block["type"]
        yield _event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _more(self, delta: dict[str, Any]) -> Event:
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _end(self) -> Iterable[Event]:
        if self._open:
            self._open = ""
            yield _event({"type": "content_block_stop", "index": self._index})

    def _stop(self, answer: Answer) -> dict[str, Any]:
        sequence = None
        if answer.finish_reason == "stop":
            sequence = self._stop_sequence(answer)
        reasons = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}
        reason = "stop_sequence" if sequence else reasons[answer.finish_reason]
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _stop_sequence(self, answer: Answer) -> str | None:
        """Return the stop sequence that ended the text, from the sampled tokens after the text."""
        sampled = self._context.tokenizer.decode(answer.completion.token_ids)
        rest = sampled[len(answer.completion.text) :]
        return next((stop for stop in self._request.stop if rest.startswith(stop)), None)


def _models(body: fields.Body, sender: Sender) -> Any:
    names = sender.model_names
    entries = [_model_entry(name) for name in names]
    return {"data": entries, "has_more": False, "first_id": names[0], "last_id": names[-1]}


def _model(body: fields.Body, sender: Sender) -> Any:
    check_model(sender.path["model"], sender.accepted)
    return _model_entry(sender.path["model"])


def _model_entry(name: str) -> dict[str, str]:
    known = {"type": "model", "id": name, "display_name": name, "lifecycle": "active"}
    return {**known, "created_at": "1970-01-01T00:00:00Z"}  # the API's value for an unknown date


def _event(data: dict[str, Any]) -> Event:
    return Event(data, data["type"])


def _error(error: ApiError) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(error.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


ANTHROPIC = Dialect(
    name="anthropic",
    paths=("/v1/messages",),
    parse=parse,
    framing=SSE,
    listings=(
        Listing("POST", "/v1/messages/count_tokens", _count_tokens),
        Listing("GET", "/v1/models", _models, "anthropic-version"),
        Listing("GET", "/v1/models/{model:.+}", _model, "anthropic-version"),
    ),
    error=_error,
    error_event=lambda error: _event(_error(error)),
    names={"stop": "stop_sequences"},
)
