"""Tokenizer with chat template, and a decoder that streams text in whole characters."""

import functools
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from lightning_jax.models import chat_template
from lightning_jax.models.chat_template import end_of_turn
from lightning_jax.models.model_files import malformed, read_object
from lightning_jax.models.vocabulary import slow_tokenizers, token_bytes, tokenizer_files
from lightning_jax.types import Message

TOOL_TEMPLATE = "tool_use"  # name of the template that transformers uses for tools
_NUM_REMEMBERED, _MAX_REMEMBERED = 512, 2**16  # cached texts, and characters of one: 32 M at most
_UNLOCKED = 2**11  # characters; a longer text is encoded without holding the GIL
_REPLACEMENT = "\ufffd"  # decoded from bytes that are not, or not yet, a character


class Tokenizer:
    """Vocabulary with its chat template. Safe to share between threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        template: str | None = None,
        eos_ids: Iterable[int] = (),
        special_tokens: Mapping[str, str] | None = None,
        tool_format: str = "",
        tool_template: str | None = None,
        habits: Mapping[str, Any] | None = None,
    ) -> None:
        self._backend = backend
        self.habits = dict(habits or {})  # see tokenizer_files.HABITS; for other programs
        self.template = template
        self.tool_template = tool_template  # to use with tools, where the model has one for them
        self.tool_format = tool_format  # that the model writes calls in; "": known by its template
        self.special_tokens = dict(special_tokens or {})  # "eos_token" -> "<|im_end|>" and such
        self.named_eos_ids = frozenset(eos_ids)  # those that the model's files name
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in self._added.items() if token.special)
        self.added_ids = frozenset(self._added)  # matched whole in text, special or not
        # All rollouts of a group start with the same prompt.
        self._encode_once = functools.lru_cache(maxsize=_NUM_REMEMBERED)(self._encode)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the caches."""
        return _unpickle, (self.to_json(), self._options())

    def _options(self) -> dict[str, Any]:
        """Return the keyword arguments of `__init__`."""
        return {
            "template": self.template,
            "eos_ids": self.named_eos_ids,
            "special_tokens": self.special_tokens,
            "tool_format": self.tool_format,
            "tool_template": self.tool_template,
            "habits": self.habits,
        }

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of a text, without adding any, and cache recent texts.

        With `special` False, "<|im_end|>" is read as ordinary characters. Raises ValueError if
        the text is not valid Unicode.
        """
        if len(text) > _MAX_REMEMBERED:
            return list(self._encode(text, special))
        return list(self._encode_once(text, special))

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of a whole text, with those that the tokenizer adds, such as BOS.

        Raises ValueError like `encode`.
        """
        return list(self._encode(text, True, True))

    def _encode(self, text: str, special: bool, whole: bool = False) -> tuple[int, ...]:
        backend = self._backend if special else self._plain_backend
        try:
            if len(text) <= _UNLOCKED:
                return tuple(backend.encode(text, add_special_tokens=whole).ids)
            # Unlike `encode`, `encode_batch` releases the GIL.
            return tuple(backend.encode_batch([text], add_special_tokens=whole)[0].ids)
        except TypeError as error:  # raised by the Rust library for half a surrogate pair
            raise ValueError(
                "the text contains half of a surrogate pair; send valid Unicode text"
            ) from error

    @functools.cached_property
    def max_token_bytes(self) -> int | None:
        """Most bytes of text that one token can represent, or None if there is no bound.

        A text of more than n times this many bytes has more than n tokens.
        """
        return token_bytes.longest(self._backend)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of token ids. Bytes that are not valid UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    @functools.cached_property
    def pieces(self) -> token_bytes.Pieces:
        """Names and bytes of single tokens."""
        return token_bytes.Pieces(self._backend)

    def token_id(self, token: str) -> int | None:
        """Return the id of the token with this text, or None if the vocabulary lacks it."""
        return self._backend.token_to_id(token)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Token ids by text, added tokens included."""
        return self._backend.get_vocab(with_added_tokens=True)

    @functools.cached_property
    def special_pattern(self) -> re.Pattern[str] | None:
        """Pattern of the texts of special tokens, longest first, or None if there are none."""
        special = {token.content for token in self._added.values() if token.special}
        texts = sorted((text for text in special if len(text) > 1), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts))) if texts else None

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text of a conversation. Raises chat_template.TemplateError.

        `kwargs` are other variables for the template. With tools it is the template for tools, if
        the model has one, as in transformers.
        """
        if self.template is None:
            raise chat_template.TemplateError(
                "this model has no chat template in tokenizer_config.json, chat_template.jinja or "
                "the GGUF metadata; use an instruct model, or set model.chat_template to a file",
                reason="missing",
                key="chat_template",
            )
        return chat_template.render_template(
            self.tool_template if tools and self.tool_template else self.template,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            special_tokens=self.special_tokens,
            kwargs=kwargs,
        )

    def with_chat(
        self,
        *,
        template: str | None = None,
        tool_template: str | None = None,
        tool_format: str | None = None,
    ) -> "Tokenizer":
        """Return the same vocabulary with other chat templates or another format of tool calls.

        `template` alone is used with tools too.
        """
        options = self._options()
        if template is not None:
            options |= {"template": template, "tool_template": tool_template}
        if tool_format is not None:
            options["tool_format"] = tool_format
        return Tokenizer(self._backend, **options)

    @functools.cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        # A copy, because the switch is set on the object and other threads use the original.
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        return backend

    @functools.cached_property
    def template_end_id(self) -> int | None:
        """Token that the chat template writes after a response, or None if it writes none."""
        if self.template is None:
            return None
        added = {token.content: i for i, token in self._added.items()}
        return end_of_turn(self.template, self.special_tokens, added)

    @functools.cached_property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a response: those that the files name, and the chat template's end."""
        end = self.template_end_id
        return self.named_eos_ids | (frozenset() if end is None else {end})

    @property
    def end_of_turn_id(self) -> int | None:
        """Token with which the model itself ends a response, or None if there is none."""
        if self.template_end_id is not None:
            return self.template_end_id
        named = self.token_id(self.special_tokens.get("eos_token", ""))
        return named if named in self.eos_ids else min(self.eos_ids, default=None)

    def to_json(self) -> str:
        """Return the tokenizer as the text of a tokenizer.json."""
        return self._backend.to_str()

    def save(self, directory: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json for transformers' AutoTokenizer."""
        self._backend.save(str(directory / "tokenizer.json"))
        settings: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **self.special_tokens,
            **self.habits,
        }
        settings["clean_up_tokenization_spaces"] = False
        if self.tool_template is not None:
            named = {"default": self.template or "", TOOL_TEMPLATE: self.tool_template}
            settings["chat_template"] = [
                {"name": name, "template": template} for name, template in named.items()
            ]
        elif self.template is not None:
            settings["chat_template"] = self.template
        text = json.dumps(settings, indent=2, ensure_ascii=False)
        (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _unpickle(backend: str, options: Mapping[str, Any]) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_str(backend), **options)


def from_hf(directory: Path) -> Tokenizer:
    """Load the tokenizer of a Hugging Face model directory. Raises ModelError.

    One that has no tokenizer.json is converted.
    """
    path = directory / "tokenizer.json"
    names: Mapping[str, str] = {}
    if path.is_file():
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the Rust library raises nothing narrower
            raise malformed(path, "a readable tokenizer", error) from error
    else:
        backend, names = slow_tokenizers.convert(directory)
    # Truncation or padding left over from training would cut or lengthen every prompt.
    backend.no_truncation()
    backend.no_padding()
    settings = read_object(directory / "tokenizer_config.json")
    named = tokenizer_files.named_tokens(directory, settings)
    tokenizer_files.add_declared(backend, directory, settings, named)
    special = {**names, **named.texts}
    ends = tokenizer_files.declared_ends(directory)
    named_end = backend.token_to_id(special.get("eos_token", ""))
    templates = tokenizer_files.read_templates(directory, settings)
    return Tokenizer(
        backend,
        template=templates.get("default"),
        tool_template=templates.get(TOOL_TEMPLATE),
        eos_ids=ends if named_end is None else ends | {named_end},
        special_tokens=special,
        habits=tokenizer_files.read_habits(settings),
    )


class StreamDecoder:
    """Decoder of a response whose tokens arrive one by one.

    The joined pieces equal the text of all ids decoded at once. With `context`, the ids before the
    first one, they equal what the ids add to its text: some vocabularies drop a blank at the start
    of a text. The DecodeStream of `tokenizers` does not serve: it raises when byte tokens of a
    byte-fallback vocabulary form no character.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        shown_ids: Iterable[int] = (),
        context: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden_ids = tokenizer.special_ids.difference(shown_ids)
        # Decoding restarts from `_context`, the last piece already returned, because some
        # vocabularies write a word's leading space only after another token.
        self._context: list[int] = list(context)
        self._fresh: list[int] = []
        self._given = 0  # characters of the fresh text already returned

    def push(self, token_id: int) -> str:
        """Add a token and return the text that it completes.

        This is "" for partial characters, and for special tokens that are not in `shown_ids`.
        """
        return "" if token_id in self._hidden_ids else self._add([token_id])

    def extend(self, token_ids: Iterable[int]) -> str:
        """Add tokens and return the text that they complete, the same as `push` of each.

        Tokens that join their neighbours are decoded together, which is much faster.
        """
        visible = [token_id for token_id in token_ids if token_id not in self._hidden_ids]
        if len(visible) == 1:
            return self._add(visible)
        texts: list[str] = []
        for joins, run in itertools.groupby(visible, self._tokenizer.pieces.joins):
            ids, is_whole = list(run), joins and not self._fresh and not self._is_torn()
            runs = [ids] if is_whole else [[token_id] for token_id in ids]
            texts += map(self._add, runs)
        return "".join(texts)

    def _add(self, ids: list[int]) -> str:
        self._fresh += ids
        text = self._fresh_text()
        # Later bytes can turn up to three trailing replacement marks into one character.
        stable = text[: len(text) - min(3, len(text) - len(text.rstrip(_REPLACEMENT)))]
        if len(stable) == len(text):
            # Bytes after a whole character need no context.
            needs_none = text and self._tokenizer.pieces.joins_bytes
            self._context, self._fresh = [] if needs_none else self._fresh, []
            start, self._given = self._given, 0
            return text[start:]
        piece = stable[self._given :]
        self._given = max(self._given, len(stable))
        return piece

    def flush(self) -> str:
        """Return the rest at the end: U+FFFD for bytes that never became a character."""
        piece = self._fresh_text()[self._given :]
        self._context, self._fresh, self._given = self._context + self._fresh, [], 0
        return piece

    def _is_torn(self) -> bool:
        """Return True if the context ends within a character."""
        return bool(self._context) and self._decode(self._context).endswith(_REPLACEMENT)

    def _fresh_text(self) -> str:
        if not self._context:
            return self._decode(self._fresh)
        before = self._decode(self._context)
        whole = self._decode(self._context + self._fresh)
        # A byte-fallback vocabulary decodes a run of bytes as a whole, so the earlier text may
        # change when fresh tokens follow it.
        if whole.startswith(before):
            return whole[len(before) :]
        return self._decode(self._fresh)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=False)  # none of `ids` is hidden
