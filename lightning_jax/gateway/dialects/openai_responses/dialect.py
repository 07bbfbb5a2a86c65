"""OpenAI's responses API.

A stored conversation is all messages up to an answer, under that answer's id. Instructions apply to
one request only.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_jax.engine.types import MAX_TOP_LOGPROBS
from lightning_jax.gateway import fields
from lightning_jax.gateway.answer import Answer, CallDelta, Delta
from lightning_jax.gateway.dialects.base import (
    Dialect,
    Event,
    Framing,
    MakeReply,
    ReplyContext,
    Sender,
    sse,
)
from lightning_jax.gateway.dialects.openai_fields import (
    HARMLESS,
    completion_tokens,
    function_of,
    logprob_entries,
    output_schema,
    sampling_fields,
)
from lightning_jax.gateway.dialects.openai_responses.input import input_messages
from lightning_jax.gateway.dialects.openai_responses.output import Output
from lightning_jax.gateway.dialects.openai_responses.saved import LISTINGS, LOGPROBS, saved
from lightning_jax.gateway.errors import ApiError, invalid
from lightning_jax.gateway.request import Function, PolicyRequest, ToolChoice, agent_of
from lightning_jax.types import Message

# Fields that this server cannot support, each with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "prompt": (),
}
_KNOWN = {
    *("model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "text"),
    *("max_output_tokens", "max_tool_calls", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "logit_bias", "top_logprobs", "include", "stream"),
    *("stream_options", "previous_response_id", "metadata", "truncation", "reasoning"),
    *("prompt_cache_options", "return_token_ids"),
    *_UNSUPPORTED,
    *HARMLESS,
}


def parse(body: fields.Body, sender: Sender) -> tuple[PolicyRequest, MakeReply]:
    """Return the request in a responses body. Raise ApiError that names the first invalid field."""
    fields.refuse_unsupported(body, _UNSUPPORTED)
    fields.warn_unknown("responses", body, _KNOWN)
    settings = _settings(body)
    conversation = (*_previous(body, sender), *input_messages(body.get("input")))
    instructions = settings["instructions"]
    system = () if instructions is None else ({"role": "system", "content": instructions},)
    top = settings["top_logprobs"]
    request = PolicyRequest(
        dialect="responses",
        id_prefix="resp_",
        model=settings["model"],
        agent=agent_of(settings["model"], sender.accepted, sender.headers, settings["metadata"]),
        messages=(*system, *conversation),
        functions=tuple(_functions(body)),
        tool_choice=_tool_choice(body),
        parallel_tool_calls=settings["parallel_tool_calls"],
        output_schema=output_schema(settings["text"]["format"], "text.format"),
        max_tokens=settings["max_output_tokens"],
        logprobs=LOGPROBS in fields.strings(body, "include") or top > 0,
        top_logprobs=top,
        **sampling_fields(body),
    )
    store = fields.flag(body, "store", True)

    def save(response: Mapping[str, Any], answer: Message) -> None:
        if store:
            kept = saved(response, (*conversation, answer))
            sender.conversations.save(response["id"], kept)

    return request, lambda context: ResponsesReply(request, settings, save, context)


def _settings(body: fields.Body) -> dict[str, Any]:
    """Return the fields that the response repeats."""
    limit = fields.integer(body, "max_output_tokens")
    if limit is not None and limit < 1:
        raise invalid(
            f"max_output_tokens is {fields.brief(limit)}; expected at least 1.",
            "max_output_tokens",
            reason="out_of_range",
        )
    metadata = fields.field(body, "metadata", dict, {}, "an object of strings")
    if not all(isinstance(value, str) for value in metadata.values()):
        raise invalid(
            f"metadata is {fields.brief(metadata)}; expected an object of strings.",
            "metadata",
            reason="wrong_type",
        )
    truncation = fields.text(body, "truncation", "disabled")
    if truncation not in ("auto", "disabled"):
        raise invalid(
            f"truncation is {fields.brief(truncation)}; expected auto or disabled.",
            "truncation",
            reason="unknown",
        )
    return {
        "model": fields.text(body, "model"),
        "instructions": fields.field(body, "instructions", str, None, "a string"),
        "max_output_tokens": limit,
        "metadata": metadata,
        "parallel_tool_calls": fields.flag(body, "parallel_tool_calls", True),
        "previous_response_id": fields.field(body, "previous_response_id", str, None, "a string"),
        "temperature": fields.number(body, "temperature", 1.0),
        "text": {"format": _format(body)},
        "tool_choice": "auto" if body.get("tool_choice") is None else body["tool_choice"],
        "tools": [_tool_shown(tool) for tool in fields.objects(body, "tools")],
        "top_logprobs": fields.bounded(body, "top_logprobs", 0, 0, MAX_TOP_LOGPROBS),
        "top_p": fields.number(body, "top_p", 1.0),
        "truncation": truncation,
        "user": fields.field(body, "user", str, None, "a string"),
    }


def _previous(body: fields.Body, sender: Sender) -> tuple[Message, ...]:
    response_id = body.get("previous_response_id")
    if response_id is None:
        return ()
    found = sender.conversations.get(response_id)
    if found is None:
        raise invalid(
            f"previous_response_id is {fields.brief(response_id)}, which is not stored; pass the "
            "id of a response from this rollout made with store on.",
            "previous_response_id",
            "previous_response_not_found",
        )
    return found.messages


def _format(body: fields.Body) -> dict[str, Any]:
    spec = fields.field(
        fields.field(body, "text", dict, {}, "an object"), "format", dict, {}, "an object"
    )
    if spec.get("type") != "json_schema":
        return {"type": spec.get("type") or "text"}
    return {
        "type": "json_schema",
        "name": fields.text(spec, "name", "answer"),
        "schema": spec.get("schema"),
        "strict": fields.flag(spec, "strict"),
    }


def _functions(body: fields.Body) -> Iterable[Function]:
    for index, tool in enumerate(fields.objects(body, "tools")):
        if tool.get("type") != "function":
            raise invalid(
                f"tools[{index}] is of type {fields.brief(tool.get('type'))}, which is not "
                "supported; pass a function.",
                "tools",
                "unsupported_parameter",
                reason="unsupported",
                key=f"tools[{index}].type",
            )
        yield function_of(tool, f"tools[{index}]")


def _tool_shown(tool: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("type", "name", "description", "parameters")
    return {key: tool.get(key) for key in keys} | {"strict": fields.flag(tool, "strict")}


def _tool_choice(body: fields.Body) -> ToolChoice:
    choice = body.get("tool_choice")
    if choice is None:
        return ToolChoice()
    if choice in ("auto", "none", "required"):
        return ToolChoice(choice)
    match choice:
        case {"type": "function", "name": str(name)}:
            return ToolChoice("required", (name,))
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [*tools]}:
            names = [name for tool in tools if isinstance(name := _name_of(tool), str)]
            if len(names) == len(tools):
                return ToolChoice(mode, tuple(names))
    raise invalid(
        f"tool_choice is {fields.brief(choice)}; expected auto, none, required or named functions.",
        "tool_choice",
        reason="unknown",
    )


def _name_of(tool: Any) -> Any:
    return tool.get("name") if isinstance(tool, dict) else None


@dataclass
class ResponsesReply:
    """Response as a whole or in events. It saves the conversation once its answer is done."""

    request: PolicyRequest
    settings: Mapping[str, Any]
    save: Callable[[Mapping[str, Any], Message], None]
    context: ReplyContext
    _output: Output = field(init=False)

    def __post_init__(self) -> None:
        self._output = Output(self.context.token)

    def body(self, answers: Sequence[Answer]) -> dict[str, Any]:
        for _ in self._whole(answers[0]):
            pass
        return self._finished(answers)

    def opening(self) -> Iterable[Event]:
        for kind in ("response.created", "response.in_progress"):
            yield Event({"type": kind, "response": self._response("in_progress")}, kind)

    def delta(self, delta: Delta) -> Iterable[Event]:
        yield from self._output.add_text(delta.text, self._entries(delta.chunk))
        for call in delta.calls:
            yield from self._output.add_call(call)

    def ending(self, answers: Sequence[Answer]) -> Iterable[Event]:
        yield from self._output.finish(_status(answers[0]))
        response = self._finished(answers)
        kind = f"response.{response['status']}"
        yield Event({"type": kind, "response": response}, kind)

    def _whole(self, answer: Answer) -> Iterable[Event]:
        """Yield the events of an answer that arrives as a whole."""
        yield from self._output.add_text(answer.text, self._entries(answer.completion))
        for index, call in enumerate(answer.tool_calls):
            delta = CallDelta(index, call.call_id, call.name, call.arguments)
            yield from self._output.add_call(delta)
        yield from self._output.finish(_status(answer))

    def _finished(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        response = self._response(_status(answer)) | {
            "output": list(self._output.items),
            "usage": self._usage(answers),
        }
        if self.request.return_token_ids:
            response["prompt_token_ids"] = list(answer.prompt_ids)
            response["token_ids"] = list(answer.completion.token_ids)
        self.save(response, answer.as_message())
        return response

    def _response(self, status: str) -> dict[str, Any]:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.request.id_prefix + self.context.token,
            "object": "response",
            "created_at": self.context.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": cut,
            **self.settings,
            "output": [],
            "usage": None,
        }

    def _entries(self, tokens: Any) -> list[dict[str, Any]]:
        """Return log-probability entries. `bytes` is empty if a token is not a whole character."""
        if not self.request.logprobs or tokens is None:
            return []
        top = self.request.top_logprobs
        entries = logprob_entries(tokens, self.context.tokenizer, top)
        for entry in entries:
            for token in (entry, *entry["top_logprobs"]):
                token["bytes"] = token["bytes"] or []
        return entries

    def _usage(self, answers: Sequence[Answer]) -> dict[str, Any]:
        prompt, sampled = self.context.prompt_tokens(), completion_tokens(answers)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        }


def _status(answer: Answer) -> str:
    return "incomplete" if answer.finish_reason == "length" else "completed"


def _error_event(error: ApiError) -> Event:
    """Return an event with an `error` object, for OpenAI's clients, and the same fields on top."""
    inner = error.body["error"]
    flat = {key: inner[key] for key in ("code", "message", "param")}
    return Event({"type": "error", **flat, "error": inner}, "error")


RESPONSES = Dialect(
    name="responses",
    paths=("/v1/responses",),
    parse=parse,
    framing=Framing("text/event-stream", sse, numbered=True),
    listings=LISTINGS,
    error_event=_error_event,
    names={
        "messages": "input",
        "response_format": "text.format",
        "max_tokens": "max_output_tokens",
    },
)
