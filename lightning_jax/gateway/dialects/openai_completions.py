"""OpenAI's completions API for plain prompts.

`echo` with `logprobs` returns the log-probabilities of the prompt's tokens too, with null for the
first token. `text_offset` counts from the start of a choice's own text. The tokenizer's own BOS
precedes a text prompt unless `add_special_tokens` is false, and is no part of the echoed text.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from lightning_jax.engine.response import Chunk
from lightning_jax.engine.types import Completion, PromptScores
from lightning_jax.errors import brief
from lightning_jax.gateway import fields
from lightning_jax.gateway.answer import Answer, Delta
from lightning_jax.gateway.dialects.base import (
    Dialect,
    Event,
    Reply,
    Sender,
    TokenEntries,
    to_request,
)
from lightning_jax.gateway.dialects.openai_fields import (
    IGNORED,
    ChoiceFields,
    ChoicesReply,
    choice_of,
)
from lightning_jax.gateway.dialects.unknown_fields import check_unknown
from lightning_jax.gateway.errors import invalid
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
    add_special_tokens: bool | None = None
    top_logprobs: fields.TopLogprobs | None = Field(None, alias="logprobs")


def parse(body: fields.Body, sender: Sender) -> Reply:
    """Return the reply to a completions body. Raise ApiError naming the first invalid field."""
    payload = CompletionsBody.read(body)
    # An echoed prompt has its special tokens in any case.
    unused = ("skip_special_tokens",) if payload.echo else ()
    check_unknown("completions", payload.model_extra, (*IGNORED, *unused))
    n, echo = payload.num_choices or 1, bool(payload.echo)
    logprobs = payload.top_logprobs is not None
    if payload.best_of not in (None, n):
        raise invalid(
            f"best_of is {brief(payload.best_of)} but n is {n}; every sample is returned, "
            "so set both to the same number.",
            "best_of",
            "unsupported_parameter",
            reason="unsupported",
        )
    if echo and logprobs and payload.stream:
        raise invalid(
            "echo with logprobs cannot be streamed; set stream to false or leave out echo.",
            "echo",
            reason="conflict",
        )
    include_usage = payload.include_usage()
    request = to_request(
        "completions",
        payload,
        sender,
        id_prefix="cmpl-",
        max_tokens=DEFAULT_MAX_TOKENS if payload.max_tokens is None else payload.max_tokens,
        logprobs=logprobs,
        score_prompt=echo and logprobs,
    )
    return CompletionsReply(request, include_usage, echo)


@dataclass
class _Transcript:
    """Tokens of one choice in the legacy format. Pass each token once, in order."""

    tokenizer: Tokenizer
    top: int
    as_ids: bool
    prompt_ids: Sequence[int]
    _length: int = 0  # number of characters before the next token
    _entries: TokenEntries = field(init=False)
    _decoder: StreamDecoder = field(init=False)

    def __post_init__(self) -> None:
        # The text continues the prompt's, so that no blank is dropped.
        self._entries = TokenEntries(self.tokenizer, self.top, self.as_ids, is_start=False)
        self._decoder = StreamDecoder(self.tokenizer, context=self.prompt_ids[-1:])

    def prompt(self, text: str, inside: range, scores: PromptScores) -> dict[str, list[Any]]:
        """Return the entries of an echoed prompt, whose special tokens are part of the text.

        Only the tokens at the places `inside` are, not those that the tokenizer adds around it.
        """
        decoder, offsets = StreamDecoder(self.tokenizer, self.tokenizer.special_ids), []
        for place, token_id in enumerate(self.prompt_ids):
            offsets.append(min(self._length, len(text)))
            self._length += len(decoder.push(token_id)) if place in inside else 0
        self._length = len(text)
        first = _scored(self.prompt_ids[:1], PromptScores((0.0,), ((),)))
        others = _scored(self.prompt_ids[1:], scores)
        columns = _columns([*self._entries.write(first), *self._entries.write(others)], offsets)
        columns["token_logprobs"][0] = columns["top_logprobs"][0] = None
        if inside and not self.as_ids:
            start = inside.start
            top = columns["top_logprobs"][start]
            columns["tokens"][start] = self._name_at_start(self.prompt_ids[start], top)
        return columns

    def _name_at_start(self, token_id: int, top: dict[str, float] | None) -> str:
        """Return the name of the text's first token, without a blank that the text lacks.

        Rename it among the likeliest tokens too.
        """
        pieces = self.tokenizer.pieces
        name, added = pieces.name(token_id), pieces.at_start(token_id)
        if added == pieces.of(token_id):
            return name
        piece = added.decode(errors="replace")
        if top is not None:
            if piece in top:  # another token has this name
                return name
            top[piece] = top.pop(name)
        return piece

    def sampled(self, tokens: Completion | Chunk) -> dict[str, list[Any]]:
        offsets = []
        for token_id in tokens.token_ids:
            offsets.append(self._length)
            self._length += len(self._decoder.push(token_id))
        return _columns(self._entries.write(tokens), offsets)


def _scored(ids: Sequence[int], scores: PromptScores) -> Chunk:
    """Return tokens of a prompt in the form of sampled tokens."""
    logprobs, nothing = scores.logprobs, (False,) * len(ids)
    return Chunk("", tuple(ids), logprobs, logprobs, (0,) * len(ids), nothing, scores.top_logprobs)


def _columns(entries: list[dict[str, Any]], offsets: list[int]) -> dict[str, list[Any]]:
    """Return entries as columns. `top_logprobs` always includes the token itself."""
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [
            {other["token"]: other["logprob"] for other in (*entry["top_logprobs"], entry)}
            for entry in entries
        ],
        "text_offset": offsets,
    }


def _inside(prompt_ids: Sequence[int], plain: Sequence[int]) -> range:
    """Return the places of a text's own tokens between those that the tokenizer adds around it."""
    starts = range(len(prompt_ids) - len(plain) + 1)
    start = next((n for n in starts if list(prompt_ids[n : n + len(plain)]) == list(plain)), 0)
    return range(start, start + len(plain))


@dataclass
class CompletionsReply(ChoicesReply):
    """Text completion bodies and chunks, which have the same format."""

    echo: bool = False
    _transcripts: dict[int, _Transcript] = field(default_factory=dict)  # by choice
    whole_object = chunk_object = "text_completion"
    nothing: ClassVar = {"text": ""}

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

    def _prompt_choice(self, index: int, scores: PromptScores | None) -> dict[str, Any]:
        """Return the part of a choice that is about its prompt."""
        prompt_ids, tokenizer = self.context.prompt_ids[index], self.context.tokenizer
        choice = choice_of(index, text="")
        if self.echo:
            assert self.request.prompts, "this dialect has prompts"
            sent = self.request.prompts[index // self.request.num_choices]
            choice["text"] = (
                sent if isinstance(sent, str) else tokenizer.decode(sent, skip_special=False)
            )
            if scores is not None:
                plain = tokenizer.encode(sent) if isinstance(sent, str) else sent
                choice["logprobs"] = self._transcript(index).prompt(
                    choice["text"], _inside(prompt_ids, plain), scores
                )
        if self.request.return_token_ids:
            choice |= {"prompt_token_ids": list(prompt_ids), "token_ids": []}
        return choice

    def _choice(self, index: int, text: str, tokens: Completion | Chunk | None) -> dict[str, Any]:
        choice = choice_of(index, text=text)
        if tokens and self.request.logprobs:
            choice["logprobs"] = self._transcript(index).sampled(tokens)
        if tokens and self.request.return_token_ids:
            choice["token_ids"] = list(tokens.token_ids)
        return choice

    def _transcript(self, index: int) -> _Transcript:
        request = self.request
        as_ids = request.return_tokens_as_token_ids
        prompt_ids = self.context.prompt_ids[index]
        new = _Transcript(self.context.tokenizer, request.top_logprobs, as_ids, prompt_ids)
        return self._transcripts.setdefault(index, new)


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
