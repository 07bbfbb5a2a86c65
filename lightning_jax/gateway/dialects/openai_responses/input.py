"""Conversion of the items in OpenAI's responses API to chat messages.

One answer of the policy is one assistant message, but this API sends it as several items: one for
its text and one for each call. Items whose ids name the same response are joined again. If a client
left the ids out, adjacent items are joined. So the message is the generated one, and is rendered
with the sampled token ids.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field

from lightning_jax.gateway.answer import function_call
from lightning_jax.gateway.dialects.base import extend_turn, text_blocks
from lightning_jax.gateway.dialects.left_out import MEDIA, sentence
from lightning_jax.gateway.dialects.openai_fields import offered_name
from lightning_jax.gateway.dialects.openai_responses.tools import Tools, custom_arguments
from lightning_jax.gateway.fields import Fields, Listed
from lightning_jax.types import Message

_ITEM_ID = re.compile(r"(?:msg|fc|ctc)_([0-9a-f]+)_\d+")


def item_id(kind: str, token: str, index: int) -> str:
    """Return the id of a response's item: its kind, the response's token, the item's index."""
    return f"{kind}_{token}_{index}"


class Text(Fields):
    type: Literal["input_text", "output_text", "text"]
    text: str


class Refusal(Fields):
    type: Literal["refusal"]
    text: str = Field(alias="refusal")


Texts = Annotated[
    Listed[Annotated[Text | Refusal, Discriminator("type")]],
    BeforeValidator(text_blocks),
]


class Media(Fields):
    """Picture or file in a tool's result."""

    type: Literal["input_image", "input_file"]

    @property
    def kind(self) -> str:
        return MEDIA[self.type]

    @property
    def text(self) -> str:
        return sentence(self.kind)


class MessageItem(Fields):
    type: Literal["message"]
    id: Any = None
    role: Literal["user", "system", "developer", "assistant"]
    content: Texts

    def message(self) -> Message:
        return {"role": self.role, "content": _joined(self.content)}


class _Call(Fields):
    id: Any = None
    call_id: str
    name: str
    namespace: str | None = None

    def _message(self, arguments: str) -> Message:
        name = offered_name(self.name, self.namespace)
        call = function_call(self.call_id, name, arguments)
        return {"role": "assistant", "content": "", "tool_calls": [call]}


class CallItem(_Call):
    type: Literal["function_call"]
    arguments: str

    def message(self) -> Message:
        return self._message(self.arguments)


class CustomCallItem(_Call):
    type: Literal["custom_tool_call"]
    input: str

    def message(self) -> Message:
        return self._message(custom_arguments(self.input))


class OutputItem(Fields):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Annotated[
        Listed[Annotated[Text | Refusal | Media, Discriminator("type")]],
        BeforeValidator(text_blocks),
    ]

    def message(self) -> Message:
        return {"role": "tool", "tool_call_id": self.call_id, "content": _joined(self.output)}


class ReasoningText(Fields):
    text: str = ""


class ReasoningItem(Fields):
    """Reasoning of another model: the policy returns its own as text."""

    type: Literal["reasoning"]
    content: Listed[ReasoningText] | None = None


class ToolsItem(Fields):
    """Tools that are offered in addition to those of the body."""

    type: Literal["additional_tools"]
    tools: Tools


def _typed(item: Any) -> Any:
    is_message = isinstance(item, dict) and not item.get("type")
    return item | {"type": "message"} if is_message else item


Item = Annotated[
    MessageItem | CallItem | CustomCallItem | OutputItem | ReasoningItem | ToolsItem,
    Discriminator("type"),
]


class InputFields(Fields):
    input: Annotated[
        Listed[Annotated[Item, BeforeValidator(_typed)]],
        Field(min_length=1),
        BeforeValidator(lambda v: [{"role": "user", "content": v}] if isinstance(v, str) else v),
    ]


@dataclass(frozen=True)
class Input:
    """Content of the input items."""

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] = ()  # that items add
    media: tuple[str, ...] = ()  # kinds that the policy does not see


def read_input(value: Any) -> Input:
    """Return the content of a text or a list of items. Raise ApiError that names the first invalid
    item.
    """
    conversation, tools, media = _Conversation(), [], []
    for item in InputFields.read({"input": value}).input:
        match item:
            case ReasoningItem():
                conversation.thought += "".join(part.text for part in item.content or ())
            case CallItem() | CustomCallItem() | MessageItem(role="assistant"):
                conversation.add_generated(item.message(), item.id)
            case MessageItem():
                conversation.messages.append(item.message())
            case OutputItem():
                conversation.messages.append(item.message())
                media += [part.kind for part in item.output if isinstance(part, Media)]
            case ToolsItem():
                tools += item.tools
    return Input(tuple(conversation.messages), tuple(tools), tuple(media))


@dataclass
class _Conversation:
    """Messages of a conversation while its items are joined."""

    messages: list[Message] = field(default_factory=list)
    thought: str = ""  # before the next part of an assistant's turn
    _by_response: dict[str, Message] = field(default_factory=dict)

    def add_generated(self, message: Message, generated_id: Any) -> None:
        """Add part of an assistant's turn: text, or one call."""
        match = _ITEM_ID.fullmatch(generated_id) if isinstance(generated_id, str) else None
        response = match and match[1]
        whole = self._by_response.get(response or "") or self._neighbour(message, response)
        if whole is None:
            whole = {"role": "assistant", "content": ""}
            self.messages.append(whole)
        extend_turn(whole, message["content"], message.get("tool_calls", ()), self.thought)
        self.thought = ""
        if response:
            self._by_response[response] = whole

    def _neighbour(self, message: Message, response: str | None) -> Message | None:
        """Return the previous message if this one can continue it. Two texts are two messages."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or not ("tool_calls" in last or "tool_calls" in message):
            return None
        if response and any(last is whole for whole in self._by_response.values()):
            return None  # it is part of another response
        return last


def _joined(parts: Iterable[Text | Refusal | Media]) -> str:
    return "".join(part.text for part in parts)
