"""Shared parts of OpenAI's dialects: fields, functions and choices."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from lightning_jax.errors import brief
from lightning_jax.gateway.answer import Answer
from lightning_jax.gateway.dialects.base import Event, Reply
from lightning_jax.gateway.errors import invalid
from lightning_jax.gateway.fields import (
    Fields,
    Integer,
    Listed,
    Name,
    Number,
    SamplingFields,
    Strings,
)
from lightning_jax.gateway.request import (
    MAX_CHOICES,
    MAX_TOOLS,
    NO_THINKING,
    Function,
    JsonSchema,
    ToolChoice,
)

# Fields that clients send by default and that change nothing here.
IGNORED = frozenset(
    (
        *("user", "store", "service_tier", "verbosity", "prompt_cache_key", "moderation"),
        *("prompt_cache_retention", "safety_identifier", "prediction"),
    )
)


class OpenAIFields(SamplingFields):
    """Fields that all of OpenAI's dialects name alike."""

    model: str | None = None
    metadata: dict[str, Any] | None = None
    min_p: Number | None = None
    logit_bias: dict[str, Any] | None = None
    stream: bool | None = None
    return_token_ids: bool | None = None
    ignore_eos: bool | None = None


def template_kwargs(variables: dict[str, Any] | None, effort: Any) -> dict[str, Any]:
    """Return variables for the chat template: those sent, and no thinking for effort "none"."""
    return {**(NO_THINKING if effort == "none" else {}), **(variables or {})}


class StreamOptions(Fields):
    include_usage: bool | None = None


class ChoiceFields(OpenAIFields):
    """Fields of the dialects that return several choices."""

    num_choices: Annotated[Integer, Field(ge=1, le=MAX_CHOICES)] | None = Field(None, alias="n")
    max_tokens: Integer | None = None
    stop: Strings | None = None
    stream_options: StreamOptions | None = None
    return_tokens_as_token_ids: bool | None = None

    def include_usage(self) -> bool:
        """Return whether the stream ends with its usage. Raise ApiError if there is no stream."""
        if self.stream_options is None:
            return False
        if not self.stream:
            message = "stream_options is only allowed when stream is true; leave it out."
            raise invalid(message, "stream_options", reason="needs_stream")
        return bool(self.stream_options.include_usage)


class FunctionFields(Fields):
    """Function that the policy may call."""

    name: Name
    description: Any = None
    parameters: JsonSchema | None = None

    def function(self) -> Function:
        text = self.description if isinstance(self.description, str) else ""
        return Function(self.name, text, self.parameters)


class ToolFields(Fields):
    """Function inside an object of type function."""

    type: Literal["function"] | None = None
    function: FunctionFields


Tools = Annotated[Listed[ToolFields], Field(max_length=MAX_TOOLS)]


def functions_of(tools: Tools | None) -> tuple[Function, ...]:
    return tuple(tool.function.function() for tool in tools or ())


def offered_name(name: str, namespace: str | None) -> str:
    """Return the name of a function for the policy, whose functions are in no namespace."""
    return f"{namespace.removesuffix('__')}__{name}" if namespace else name


def _tool_choice(choice: Any, *, nests: bool = False) -> ToolChoice | None:
    """Return the choice in a field.

    With `nests`, a type's fields are in an object named after the type, as in the chat API.
    """

    def named(tool: Any) -> Any:
        function = tool.get("function") if nests and isinstance(tool, dict) else tool
        match function:
            case {"name": str(name), "namespace": str(namespace)}:
                return offered_name(name, namespace)
            case {"name": name}:
                return name
        return None

    if choice in (None, "auto", "none", "required"):
        return choice and ToolChoice(choice)
    kind = choice.get("type") if isinstance(choice, dict) else None
    inner = choice.get(kind) if nests and kind == "allowed_tools" else choice
    match kind, inner:
        case "function" | "custom", _ if isinstance(name := named(choice), str):
            return ToolChoice("required", (name,))
        case "allowed_tools", {"mode": "auto" | "required" as mode, "tools": [*tools]}:
            names = [named(tool) for tool in tools]
            if all(isinstance(name, str) for name in names):
                return ToolChoice(mode, tuple(names))
    raise PydanticCustomError("unknown", "expected auto, none, required or named functions")


ToolChoiceField = Annotated[ToolChoice | None, PlainValidator(_tool_choice)]
NestedToolChoice = Annotated[ToolChoice | None, PlainValidator(partial(_tool_choice, nests=True))]


class Format(Fields):
    """Format of an answer: text, any JSON object, or JSON that follows a schema."""

    type: Any = None
    name: str | None = None
    strict: bool | None = None
    schema_: JsonSchema | None = Field(None, alias="schema")

    def output_schema(self, where: str) -> JsonSchema | None:
        """Return the schema to follow, or None for text. Raise ApiError if it is missing."""
        match self.type:
            case None | "text":
                return None
            case "json_object":
                return {}
            case "json_schema" if self.schema_ is not None:
                return self.schema_
            case "json_schema":
                message = f"{where} has no schema; pass a JSON schema object."
                raise invalid(message, where, reason="missing", key=f"{where}.schema")
        message = f"{where}.type is {brief(self.type)}; expected text, json_object or json_schema."
        raise invalid(message, where, reason="unknown", key=f"{where}.type")


@dataclass
class ChoicesReply(Reply):
    """Bodies and chunks of the dialects that return several choices."""

    include_usage: bool = False
    whole_object: ClassVar[str]  # the type of a body
    chunk_object: ClassVar[str]
    nothing: ClassVar[dict[str, Any]]  # content of a choice without a token

    def envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "object": kind,
            "created": self.context.created,
            "model": self.request.model,
            "choices": choices,
        }

    def whole(self, choices: list[dict[str, Any]], answers: Sequence[Answer]) -> dict[str, Any]:
        """Return a body. Its fingerprint is the weights version that sampled the last token."""
        versions = answers[-1].completion.policy_versions
        return {
            **self.envelope(self.whole_object, choices),
            "usage": self._usage(answers),
            "system_fingerprint": f"policy-{versions[-1]}" if versions else None,
        }

    def chunk(self, choices: list[dict[str, Any]], **extra: Any) -> Event:
        usage = {"usage": None} if self.include_usage else {}
        return {**self.envelope(self.chunk_object, choices), **usage, **extra}

    @property
    def shows_tokens(self) -> bool:
        return self.request.logprobs or self.request.return_token_ids

    def keep_alive(self) -> Iterable[Event]:
        yield self.chunk([choice_of(0, **self.nothing)])

    def ending(self, answers: Sequence[Answer]) -> Iterable[Event]:
        for index, answer in enumerate(answers):
            choice = choice_of(index, **self.nothing) | {"finish_reason": answer.finish_reason}
            yield self.chunk([choice])
        if self.include_usage:
            yield self.chunk([], usage=self._usage(answers))

    def _usage(self, answers: Sequence[Answer]) -> dict[str, Any]:
        prompt, sampled = self.num_tokens(answers)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
            "prompt_tokens_details": {"cached_tokens": self.num_cached(answers)},
        }


def choice_of(index: int, **content: Any) -> dict[str, Any]:
    """Return a choice whose log-probabilities and finish reason are not set yet."""
    return {"index": index, **content, "logprobs": None, "finish_reason": None}
