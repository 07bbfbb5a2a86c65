"""Shared parts of OpenAI's dialects: fields, functions, choices and log-prob entries."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from lightning_jax.engine.response import Chunk
from lightning_jax.engine.types import Completion
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
    brief,
)
from lightning_jax.gateway.request import (
    MAX_CHOICES,
    MAX_TOOLS,
    NO_THINKING,
    Function,
    JsonSchema,
)
from lightning_jax.models.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # JSON has no minus infinity

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

    def envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "object": kind,
            "created": self.context.created,
            "model": self.request.model,
            "choices": choices,
        }

    def whole(self, choices: list[dict[str, Any]], answers: Sequence[Answer]) -> dict[str, Any]:
        return {
            **self.envelope(self.whole_object, choices),
            "usage": self._usage(answers),
            "system_fingerprint": _fingerprint(answers),
        }

    def chunk(self, choices: list[dict[str, Any]], **extra: Any) -> Event:
        usage = {"usage": None} if self.include_usage else {}
        return Event({**self.envelope(self.chunk_object, choices), **usage, **extra})

    @property
    def shows_tokens(self) -> bool:
        return self.request.logprobs or self.request.return_token_ids

    @abstractmethod
    def last_choice(self, index: int) -> dict[str, Any]:
        """Return the choice of the chunk after the last token."""

    def ending(self, answers: Sequence[Answer]) -> Iterable[Event]:
        for index, answer in enumerate(answers):
            choice = self.last_choice(index) | {"finish_reason": answer.finish_reason}
            yield self.chunk([choice])
        if self.include_usage:
            yield self.chunk([], usage=self._usage(answers))

    def _usage(self, answers: Sequence[Answer]) -> dict[str, int]:
        prompt, sampled = self.num_tokens(answers)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
        }


def _fingerprint(answers: Sequence[Answer]) -> str | None:
    """Return the weights version that sampled the last token."""
    versions = answers[-1].completion.policy_versions
    return f"policy-{versions[-1]}" if versions else None


@dataclass
class TokenEntries:
    """Writer of one entry per token of a choice, whose tokens come in order.

    The log-probabilities are those of the policy at temperature 1. With `as_ids`, a token is named
    by its id. Names are unique and do not depend on a token's place. `bytes` are those that the
    token adds to the choice's text there, so they join to it: none for a hidden special token, and
    no blank that the vocabulary drops at the start of a text.
    """

    tokenizer: Tokenizer
    top: int
    as_ids: bool = False
    is_start: bool = True  # no token has added to the text yet

    def write(self, tokens: Completion | Chunk) -> list[dict[str, Any]]:
        """Return the entries of the next tokens."""
        entries = []
        alternatives = tokens.top_logprobs or ((),) * len(tokens.token_ids)
        for token_id, logprob, others in zip(
            tokens.token_ids, tokens.behavior_logprobs, alternatives, strict=True
        ):
            best = [self._entry(i, value) for i, value in others[: self.top]]
            entries.append({**self._entry(token_id, logprob), "top_logprobs": best})
            self.is_start = self.is_start and token_id in self._hidden_ids
        return entries

    @cached_property
    def _hidden_ids(self) -> frozenset[int]:
        return self.tokenizer.special_ids | self.tokenizer.eos_ids

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        pieces, is_hidden = self.tokenizer.pieces, token_id in self._hidden_ids
        added = pieces.at_start(token_id) if self.is_start else pieces.of(token_id)
        return {
            "token": f"token_id:{token_id}" if self.as_ids else pieces.name(token_id),
            "logprob": max(logprob, MIN_LOGPROB),
            "bytes": [] if is_hidden else list(added),
        }
