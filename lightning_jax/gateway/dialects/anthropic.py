"""Anthropic's messages API."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from lightning_jax.gateway import fields
from lightning_jax.gateway.answer import Answer, Delta
from lightning_jax.gateway.dialects.base import (
    NAMED_SSE,
    Dialect,
    Event,
    Listing,
    Reply,
    Sender,
    add_assistant,
    arguments_of,
    model_listings,
    text_blocks,
    to_request,
    tool_call,
)
from lightning_jax.gateway.dialects.left_out import MEDIA, is_hosted, sentence
from lightning_jax.gateway.dialects.openai_fields import Format
from lightning_jax.gateway.dialects.unknown_fields import check_unknown
from lightning_jax.gateway.errors import ApiError, invalid
from lightning_jax.gateway.request import (
    MAX_MESSAGES,
    MAX_TOOLS,
    NO_THINKING,
    Function,
    JsonSchema,
    PolicyRequest,
    ToolChoice,
)
from lightning_jax.types import Message

# Fields that change nothing here.
_IGNORED = {
    *("service_tier", "cache_control", "context_management", "diagnostics", "betas"),
    *("inference_geo", "speed", "user_profile_id", "workspace_id"),
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


class Text(fields.Fields):
    type: Literal["text"]
    text: str


class Media(fields.Fields):
    """Picture or document, which may be text."""

    type: Literal["image", "document"]
    source: Any = None

    @property
    def kind(self) -> str:
        """Kind of media, "" for text."""
        match self.source:
            case {"type": "text", "data": str()}:
                return ""
        return MEDIA[self.type]

    @property
    def text(self) -> str:
        return sentence(self.kind) if self.kind else self.source["data"]


class Thinking(fields.Fields):
    """Thoughts of another model: the policy returns its own as text."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""


class ToolUse(fields.Fields):
    type: Literal["tool_use"]
    id: str
    name: fields.Name
    input: dict[str, Any]


Texts = Annotated[fields.Listed[Text], BeforeValidator(lambda content: text_blocks(content or []))]


class ToolResult(fields.Fields):
    type: Literal["tool_result"]
    tool_use_id: str
    content: (
        Annotated[
            fields.Listed[Annotated[Text | Media, Discriminator("type")]],
            BeforeValidator(lambda content: text_blocks(content or [])),
        ]
        | None
    ) = None
    is_error: bool | None = None

    def message(self) -> Message:
        text = _joined(self.content or ())
        if self.is_error and not text.lower().startswith("error"):
            text = f"Error: {text}"  # a chat template has no other place for the error
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": text}


class AssistantTurn(fields.Fields):
    role: Literal["assistant"]
    content: Annotated[
        fields.Listed[Annotated[Text | ToolUse | Thinking, Discriminator("type")]],
        BeforeValidator(text_blocks),
    ]


class InputTurn(fields.Fields):
    role: Literal["user", "system"]
    content: Annotated[
        fields.Listed[Annotated[Text | ToolResult, Discriminator("type")]],
        BeforeValidator(text_blocks),
    ]


class ResultsTurn(fields.Fields):
    """User's turn with results of tools. Media beside them are results, too."""

    role: Literal["user", "system"]
    content: fields.Listed[Annotated[Text | ToolResult | Media, Discriminator("type")]]


def _turn_kind(turn: Any) -> str:
    match turn:
        case {"role": "assistant"}:
            return "assistant turn"
        case {"content": [*blocks]} if any(
            isinstance(block, dict) and block.get("type") == "tool_result" for block in blocks
        ):
            return "results turn"
    return "input turn"


Turn = Annotated[
    Annotated[AssistantTurn, Tag("assistant turn")]
    | Annotated[ResultsTurn, Tag("results turn")]
    | Annotated[InputTurn, Tag("input turn")],
    Discriminator(_turn_kind),
]


class HostedTool(fields.Fields):
    type: str


class Tool(fields.Fields):
    type: Annotated[Any, fields.harmless("custom")] = None
    name: fields.Name
    description: str | None = None
    input_schema: JsonSchema


class ToolChoiceBody(fields.Fields):
    type: Literal["auto", "any", "none", "tool"] | None = None
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def tool_choice(self) -> ToolChoice:
        match self.type, self.name:
            case "any", _:
                return ToolChoice("required")
            case "tool", str(name):
                return ToolChoice("required", (name,))
            case "tool", _:
                message = "tool_choice has no name; name a tool."
                raise invalid(message, "tool_choice", reason="unknown")
        return ToolChoice(self.type or "auto")


class ThinkingConfig(fields.Fields):
    type: Any = None


class OutputConfig(fields.Fields):
    format: Format | None = None


def _tool_kind(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return "hosted tool" if is_hosted(kind) else "own tool"


AnyTool = Annotated[
    Annotated[Tool, Tag("own tool")] | Annotated[HostedTool, Tag("hosted tool")],
    Discriminator(_tool_kind),
]


class MessagesBody(fields.Fields, extra="allow"):
    model: str | None = None
    messages: Annotated[fields.Listed[Turn], Field(max_length=MAX_MESSAGES)]
    system: Texts | None = None
    max_tokens: fields.Integer | None = None
    temperature: fields.Number | None = None
    top_p: fields.Number | None = None
    top_k: fields.TopK | None = None
    stop: fields.Strings | None = Field(None, alias="stop_sequences")
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    tools: Annotated[fields.Listed[AnyTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoiceBody | None = None
    output_config: OutputConfig | None = None
    thinking: ThinkingConfig | None = None
    output_format: Format | None = None  # clients of the beta before output_config send it
    container: Annotated[Any, fields.harmless()] = None
    mcp_servers: Annotated[Any, fields.harmless([])] = None


def parse(body: fields.Body, sender: Sender) -> Reply:
    """Return the reply to a messages body. Raise ApiError that names the first invalid field."""
    request = _request(body, sender)
    if request.max_tokens is None:
        raise invalid(
            "max_tokens is missing; set the maximum number of tokens to generate.",
            "max_tokens",
            reason="missing",
        )
    return MessagesReply(request)


def _request(body: fields.Body, sender: Sender) -> PolicyRequest:
    payload = MessagesBody.read(body)
    check_unknown("anthropic", payload.model_extra, _IGNORED)
    form = (payload.output_config and payload.output_config.format) or payload.output_format
    choice, thinking = payload.tool_choice or ToolChoiceBody(), payload.thinking
    return to_request(
        "anthropic",
        payload,
        sender,
        id_prefix="msg_",
        messages=_messages(payload),
        functions=tuple(
            Function(tool.name, tool.description or "", tool.input_schema)
            for tool in payload.tools or ()
            if isinstance(tool, Tool)
        ),
        left_out=tuple(_left_out(payload)),
        tool_choice=choice.tool_choice(),
        parallel_tool_calls=not choice.disable_parallel_tool_use,
        output_schema=form and form.output_schema("output_config.format"),
        chat_template_kwargs=NO_THINKING if thinking and thinking.type == "disabled" else None,
    )


def _messages(payload: MessagesBody) -> tuple[Message, ...]:
    messages: list[Message] = []
    if payload.system:
        messages.append({"role": "system", "content": _joined(payload.system)})
    for turn in payload.messages:
        if isinstance(turn, AssistantTurn):
            uses = [block for block in turn.content if isinstance(block, ToolUse)]
            calls = [tool_call(use.name, use.input, use.id) for use in uses]
            text = "".join(block.text for block in turn.content if isinstance(block, Text))
            thought = "".join(b.thinking for b in turn.content if isinstance(b, Thinking))
            add_assistant(messages, text, calls, thought)
        else:
            _add_input(messages, turn)
    if messages and messages[-1]["role"] == "assistant":
        raise invalid(
            "messages ends with an assistant message, and continuing it is not supported; end with "
            "a user message.",
            "messages",
            reason="ends_with_assistant",
        )
    return tuple(messages)


def _add_input(messages: list[Message], turn: InputTurn | ResultsTurn) -> None:
    """Append tool results as separate messages, and adjacent texts as one message."""
    for is_result, blocks in groupby(turn.content, lambda block: isinstance(block, ToolResult)):
        if is_result:
            messages += [block.message() for block in blocks if isinstance(block, ToolResult)]
        else:
            messages.append({"role": turn.role, "content": _joined(blocks)})
    if not turn.content:
        messages.append({"role": turn.role, "content": ""})


def _left_out(payload: MessagesBody) -> Iterator[str]:
    """Yield the types of hosted tools, and the kinds of media that the policy does not see."""
    yield from (tool.type for tool in payload.tools or () if isinstance(tool, HostedTool))
    for turn in payload.messages:
        for block in turn.content:
            parts = (block.content or ()) if isinstance(block, ToolResult) else (block,)
            yield from (part.kind for part in parts if isinstance(part, Media) and part.kind)


def _joined(blocks: Iterable[Any]) -> str:
    return "\n".join(block.text for block in blocks)


@dataclass
class MessagesReply(Reply):
    """Message bodies and events. Only one block of a stream is open at a time."""

    _index: int = -1  # of the newest block
    _open: str = ""  # type of the newest block, "" once it is closed

    def body(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        content: list[dict[str, Any]] = []
        if answer.text:
            content.append({"type": "text", "text": answer.text})
        for call in answer.tool_calls:
            use = {"type": "tool_use", "id": call.call_id, "name": call.name}
            content.append({**use, "input": arguments_of(call) or {}})
        return self._message(content, self._stop(answer), answers)

    def opening(self) -> Iterable[Event]:
        message = self._message([], {"stop_reason": None, "stop_sequence": None}, ())
        yield {"type": "message_start", "message": message}

    def keep_alive(self) -> Iterable[Event]:
        yield {"type": "ping"}

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
        usage = self._usage(answers)
        yield {"type": "message_delta", "delta": self._stop(answers[0]), "usage": usage}
        yield {"type": "message_stop"}

    def _message(
        self, content: list[Any], stop: dict[str, Any], answers: Sequence[Answer]
    ) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "type": "message",
            "role": "assistant",
            "model": self.request.model,
            "content": content,
            **stop,
            "usage": self._usage(answers),
        }

    def _usage(self, answers: Sequence[Answer]) -> dict[str, int]:
        """Return the numbers of tokens. In this API, those of the input are without cached ones."""
        (prompt, sampled), cached = self.num_tokens(answers), self.num_cached(answers)
        return {
            "input_tokens": prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": sampled,
        }

    def _begin(self, block: dict[str, Any]) -> Iterable[Event]:
        yield from self._end()
        self._index += 1
        self._open = block["type"]
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _more(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _end(self) -> Iterable[Event]:
        if self._open:
            self._open = ""
            yield {"type": "content_block_stop", "index": self._index}

    def _stop(self, answer: Answer) -> dict[str, Any]:
        sequence = answer.completion.stop if answer.finish_reason == "stop" else None
        reasons = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}
        reason = "stop_sequence" if sequence else reasons[answer.finish_reason]
        return {"stop_reason": reason, "stop_sequence": sequence or None}


def _models(entries: list[dict[str, str]]) -> dict[str, Any]:
    first, last = entries[0]["id"], entries[-1]["id"]
    return {"data": entries, "has_more": False, "first_id": first, "last_id": last}


def _model_entry(name: str, sender: Sender) -> dict[str, str]:
    entry = {"type": "model", "id": name, "display_name": name, "lifecycle": "active"}
    return {**entry, "created_at": "1970-01-01T00:00:00Z"}  # the API's value for an unknown date


def _error(error: ApiError) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(error.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


ANTHROPIC = Dialect(
    name="anthropic",
    paths=("/v1/messages",),
    parse=parse,
    framing=NAMED_SSE,
    listings=(
        Listing(
            "POST",
            "/v1/messages/count_tokens",
            lambda body, sender: {"input_tokens": sender.count_tokens(_request(body, sender))},
        ),
        *model_listings("/v1/models", _model_entry, _models, "anthropic-version"),
    ),
    error=_error,
    names={"stop": "stop_sequences"},
)
