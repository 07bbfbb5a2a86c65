"""OpenAI's completions API for plain prompts.

`echo` with `logprobs` returns the log-probabilities of the prompt's tokens too, with null for the
first token. `text_offset` counts from the start of a choice's own text.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from lightning_jax.engine.response import Chunk
from lightning_jax.engine.types import Completion, PromptScores
from lightning_jax.gateway import fields
from lightning_jax.gateway.answer import Answer, Delta
from lightning_jax.gateway.dialects.base import (
    Dialect,
    Event,
    MakeReply,
    Sender,
    to_request,
)
from lightning_jax.gateway.dialects.openai_fields import (
    IGNORED,
    ChoiceFields,
    ChoicesReply,
    logprob_entries,
    token_entry,
)
from lightning_jax.gateway.errors import invalid
from lightning_jax.gateway.request import PolicyRequest
from lightning_jax.gateway.unknown_fields import check_unknown
from lightning_jax.models.tokenizer import StreamDecoder, Tokenizer

DEFAULT_MAX_TOKENS = 16
Prompts = tuple[str | tuple[int, ...], ...]


def _prompts(value: Any) -> Prompts:
    """Return the prompts from any of four forms: a text, token ids, or a list of either."""
    if isinstance(value, str) or _is_ids(value):
        value = [value]
    if isinstance(value, list) and value and all(isinstance(p, str) or _is_ids(p) for p in value):
        return tuple(p if isinstance(p, str) else tuple(p) for p in value)
    expected = "expected a text, a list of token ids, or a list of either"
    raise PydanticCustomError("wrong_type", expected)


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(i) is int and 0 <= i <= fields.MAX_INT32 for i in value)
    )


class CompletionsBody(ChoiceFields, extra="allow"):
    prompts: Annotated[Prompts, PlainValidator(_prompts)] = Field(alias="prompt")
    suffix: Annotated[Any, fields.harmless("")] = None
    best_of: fields.Integer | None = None
    echo: bool | None = None
    top_logprobs: fields.TopLogprobs | None = Field(None, alias="logprobs")


def parse(body: fields.Body, sender: Sender) -> tuple[PolicyRequest, MakeReply]:
    """Return the request in a completions body. Raise ApiError naming the first invalid field."""
    asked = fields.read(CompletionsBody, body)
    # An echoed prompt has its special tokens in any case.
    shown = ("skip_special_tokens",) if asked.echo else ()
    check_unknown("completions", asked.model_extra, (*IGNORED, *shown))
    n, echo, logprobs = asked.num_choices or 1, bool(asked.echo), asked.top_logprobs is not None
    if asked.best_of not in (None, n):
        raise invalid(
            f"best_of is {fields.brief(asked.best_of)} but n is {n}; every sample is returned, so "
            "set both to the same number.",
            "best_of",
            "unsupported_parameter",
            reason="unsupported",
        )
    if echo and logprobs and asked.stream:
        raise invalid(
            "echo with logprobs cannot be streamed; set stream to false or leave out echo.",
            "echo",
            reason="conflict",
        )
    include_usage = asked.include_usage()
    request = to_request(
        "completions",
        asked,
        sender,
        id_prefix="cmpl-",
        max_tokens=DEFAULT_MAX_TOKENS if asked.max_tokens is None else asked.max_tokens,
        logprobs=logprobs,
        score_prompt=echo and logprobs,
    )
    return request, lambda context: CompletionsReply(request, context, include_usage, echo)


@dataclass
class _Transcript:
    """Tokens of one choice in the legacy format. Pass each token once, in order."""

    tokenizer: Tokenizer
    top: int
    as_ids: bool
    _decoder: StreamDecoder = field(init=False)
    _length: int = 0  # number of characters before the next token

    def __post_init__(self) -> None:
        self._decoder = StreamDecoder(self.tokenizer)

    def prompt(self, token_ids: Sequence[int], scores: PromptScores) -> dict[str, list[Any]]:
        """Return the entries of an echoed prompt, whose special tokens are part of the text."""
        offsets = []
        for token_id in token_ids:
            special = token_id in self.tokenizer.special_ids
            shown = self.tokenizer.token_text(token_id) if special else ""
            offsets.append(self._advance(token_id, shown))
        scored = _scored(token_ids, scores)
        entries = logprob_entries(scored, self.tokenizer, self.top, self.as_ids)
        first = [token_entry(i, 0.0, self.tokenizer, self.as_ids) for i in token_ids[:1]]
        return {
            "tokens": [entry["token"] for entry in (*first, *entries)],
            "token_logprobs": [None, *(entry["logprob"] for entry in entries)],
            "top_logprobs": [None, *(_best(entry) for entry in entries)],
            "text_offset": offsets,
        }

    def sampled(self, tokens: Completion | Chunk) -> dict[str, list[Any]]:
        entries = logprob_entries(tokens, self.tokenizer, self.top, self.as_ids)
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [_best(entry) for entry in entries],
            "text_offset": [self._advance(i, "") for i in tokens.token_ids],
        }

    def _advance(self, token_id: int, shown: str) -> int:
        """Return the offset of a token. `shown` is its text if the decoder would skip it."""
        offset = self._length
        self._length += len(self._decoder.push(token_id)) + len(shown)
        return offset


def _scored(token_ids: Sequence[int], scores: PromptScores) -> Chunk:
    """Return the prompt's tokens after the first, in the form of sampled tokens."""
    ids, logprobs = tuple(token_ids[1:]), scores.logprobs
    nothing = (False,) * len(ids)
    return Chunk("", ids, logprobs, logprobs, (0,) * len(ids), nothing, scores.top_logprobs)


def _best(entry: dict[str, Any]) -> dict[str, float]:
    """Return the most likely tokens and the sampled one. Of equal texts, keep the more likely."""
    best: dict[str, float] = {}
    for other in (*entry["top_logprobs"], entry):
        best.setdefault(other["token"], other["logprob"])
    return best


@dataclass
class CompletionsReply(ChoicesReply):
    """Text completion bodies and chunks, which have the same format."""

    echo: bool = False
    _transcripts: dict[int, _Transcript] = field(default_factory=dict)  # by choice
    whole_object = chunk_object = "text_completion"

    def body(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = []
        for index, answer in enumerate(answers):
            prompt = self._prompt_choice(index, answer.completion.prompt_scores)
            choices.append(
                _joined(prompt, self._choice(index, answer.text, answer.completion))
                | {"finish_reason": answer.finish_reason}
            )
        return self.whole(choices, answers)

    def opening(self) -> Iterable[Event]:
        if self.echo or self.request.return_token_ids:
            for index in range(len(self.context.prompt_ids)):
                yield self.chunk([self._prompt_choice(index, None)])

    def delta(self, delta: Delta) -> Iterable[Event]:
        if delta.text or (delta.chunk and self.shows_tokens):
            yield self.chunk([self._choice(delta.choice, delta.text, delta.chunk)])

    def last_choice(self, index: int) -> dict[str, Any]:
        return _choice(index, "")

    def _prompt_choice(self, index: int, scores: PromptScores | None) -> dict[str, Any]:
        """Return the part of a choice that is about its prompt."""
        prompt_ids, tokenizer = self.context.prompt_ids[index], self.context.tokenizer
        choice = _choice(index, "")
        if self.echo:
            assert self.request.prompts, "this dialect has prompts"
            sent = self.request.prompts[index // self.request.num_choices]
            is_text = isinstance(sent, str)
            choice["text"] = sent if is_text else tokenizer.decode(sent, skip_special=False)
            if scores is not None:
                choice["logprobs"] = self._transcript(index).prompt(prompt_ids, scores)
        if self.request.return_token_ids:
            choice |= {"prompt_token_ids": list(prompt_ids), "token_ids": []}
        return choice

    def _choice(self, index: int, text: str, tokens: Completion | Chunk | None) -> dict[str, Any]:
        choice = _choice(index, text)
        if tokens and self.request.logprobs:
            choice["logprobs"] = self._transcript(index).sampled(tokens)
        if tokens and self.request.return_token_ids:
            choice["token_ids"] = list(tokens.token_ids)
        return choice

    def _transcript(self, index: int) -> _Transcript:
        request = self.request
        as_ids = request.return_tokens_as_token_ids
        new = _Transcript(self.context.tokenizer, request.top_logprobs, as_ids)
        return self._transcripts.setdefault(index, new)


def _choice(index: int, text: str) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None}


def _joined(prompt: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """Return a choice whose text and entries begin with its prompt's."""
    logprobs = answer["logprobs"]
    if logprobs and prompt["logprobs"]:
        logprobs = {key: prompt["logprobs"][key] + values for key, values in logprobs.items()}
    return prompt | answer | {"text": prompt["text"] + answer["text"], "logprobs": logprobs}


COMPLETIONS = Dialect(
    name="completions",
    paths=("/v1/completions",),
    parse=parse,
    names={"messages": "prompt"},
)
