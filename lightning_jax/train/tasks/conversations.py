"""Demonstrated conversations, read as the gateway reads the messages of a request."""

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field

from lightning_jax.errors import Coded, InvalidValue, brief
from lightning_jax.gateway.dialects.openai_fields import Tools, functions_of
from lightning_jax.gateway.errors import ApiError
from lightning_jax.gateway.fields import (
    Fields,
    Integer,
    harmless,
    has_surrogates,
    is_deep,
)
from lightning_jax.gateway.prompt.messages import normalize_messages
from lightning_jax.rollouts.agents.outcome import outcome_of_error
from lightning_jax.train.tasks.record_files import DatasetError
from lightning_jax.types import LLM, Message, Task

F = TypeVar("F", bound=Fields)
SETTING = "warmup.demonstrations"
Flag = Annotated[bool, BeforeValidator(lambda value: bool(value) if value in (0, 1) else value)]
NOBODY = LLM("", "", "")  # a function of demonstrations calls no policy


class RecordFields(Fields):
    """OpenAI's fine-tuning record. Other fields say something about the record itself."""

    messages: list[Any]
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    functions: Annotated[Any, harmless([])] = None


class MarkFields(Fields):
    """Fields of a demonstrated message that the model never sees, and older forms of its fields."""

    train: Flag | None = None
    weight: Annotated[Integer, Field(ge=0, le=1)] | None = None
    agent: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: Annotated[Any, harmless()] = None

    @property
    def trains(self) -> bool:
        return self.train is not False and self.weight != 0


@dataclass(frozen=True)
class Demonstrated:
    """Message of a demonstration, as chat templates expect it."""

    plain: Message
    trains: bool = False
    agent: str = ""


@dataclass(frozen=True)
class Demonstration:
    """Conversation whose assistant messages are learned, and the tools as the model sees them."""

    where: str  # such as conversations[3]
    messages: tuple[Demonstrated, ...]
    tools: list[Any] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def place(self, index: int) -> str:
        """Return how errors name the message at this index."""
        return f"{self.where}.messages[{index}]"


def call_demonstrations(function: Callable[[list[Task]], Any], tasks: list[Task]) -> list[Any]:
    """Return the conversations that the user's function gives for the tasks.

    Raises DatasetError if it raises, or returns anything but conversations.
    """
    try:
        answer = function(tasks)
        if isinstance(answer, Iterable) and not isinstance(answer, str | bytes | Mapping):
            return list(answer)
    except (Exception, SystemExit) as error:
        failed = outcome_of_error(error, NOBODY)
        raise DatasetError(
            f"{SETTING} raised {failed.reason}: {failed.detail}; mend the function.",
            reason="failed",
            key=SETTING,
        ) from error
    if inspect.iscoroutine(answer):
        answer.close()  # without a warning that nobody awaited it
    raise DatasetError.wrong_type(
        SETTING,
        f"{SETTING} returned {'a ' + type(answer).__name__ if answer is not None else 'None'}; "
        "return a list with a conversation for each task that has one.",
    )


def read_conversations(conversations: Sequence[Any]) -> list[Demonstration]:
    """Return the conversations, in all forms that the gateway's messages take.

    Raises DatasetError that names the first malformed field, such as
    conversations[3].messages[1].content.
    """
    return [
        _read_conversation(conversation, f"conversations[{index}]")
        for index, conversation in enumerate(conversations)
    ]


@contextmanager
def named(where: str) -> Iterator[None]:
    """Raise errors of this context again as a DatasetError whose field lies in `where`."""
    try:
        yield
    except (ApiError, InvalidValue) as error:
        raise unusable(where, error) from error


def unusable(where: str, error: Coded) -> DatasetError:
    """Return the error for a conversation, from one of a field of it."""
    message = str(error).rstrip(".")
    of_field = bool(error.key) and message.startswith(str(error.key))
    text = f"{where}.{message}" if of_field else f"{where}: {message}"
    key = f"{where}.{error.key}" if of_field else where
    return DatasetError(f"{SETTING}: {text}.", reason=error.reason, key=key)


def _read_conversation(conversation: Any, where: str) -> Demonstration:
    record = dict(conversation) if isinstance(conversation, Mapping) else {"messages": conversation}
    if not isinstance(record.get("messages"), list | tuple):
        text = brief(record.get("messages", conversation))
        raise DatasetError.wrong_type(
            where,
            f"{SETTING}: {where} has {text} as its messages; expected a list of messages, or "
            '{"messages": [...], "tools": [...]}.',
        )
    with named(where):
        record["messages"] = [
            _as_sent(message, f"messages[{index}]")
            for index, message in enumerate(record["messages"])
        ]
        entries = {name: record[name] for name in record if name in RecordFields.model_fields}
        rest = {name: _as_sent(entries[name], name) for name in entries if name != "messages"}
        fields = RecordFields.read({**rest, "messages": record["messages"]})
        plain = normalize_messages(fields.messages)
        tools = [function.as_tool() for function in functions_of(fields.tools)]
    marks = [_marks(m, f"{where}.messages[{index}]") for index, m in enumerate(fields.messages)]
    messages = tuple(
        Demonstrated(
            message,
            trains=message["role"] == "assistant" and mark.trains,
            agent=mark.agent or "",
        )
        for message, mark in zip(plain, marks, strict=True)
    )
    demonstration = Demonstration(where, messages, tools or None, fields.chat_template_kwargs or {})
    for index, message in enumerate(messages):
        if message.trains:
            _check_calls(message.plain, demonstration.place(index))
    return demonstration


def _marks(message: Any, where: str) -> MarkFields:
    with named(where):
        return MarkFields.read(message)


def _as_sent(value: Any, where: str) -> Any:
    """Return the value as a client's JSON would bring it. Raise InvalidValue if it cannot."""
    try:
        sent = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        text = f"{where} cannot be written as JSON ({error}); use texts, numbers, lists and dicts."
        raise InvalidValue(text, reason="not_json", key=where) from error
    if is_deep(sent):
        raise InvalidValue(f"{where} is nested too deeply.", reason="too_deep", key=where)
    if has_surrogates(sent):
        text = f"{where} has half of a surrogate pair; expected valid UTF-8."
        raise InvalidValue.wrong_type(where, text)
    return sent


def _check_calls(message: Message, where: str) -> None:
    """Raise DatasetError for arguments that no call could have: the policy would learn them."""
    for index, call in enumerate(message.get("tool_calls", ())):
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, dict):
            key = f"tool_calls[{index}].function.arguments"
            text = f"{key} is {brief(arguments)}; expected an object, or its JSON as a string."
            raise unusable(where, InvalidValue.wrong_type(key, text))
