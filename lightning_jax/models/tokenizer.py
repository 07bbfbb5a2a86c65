"""Text to token ids and back, messages to a prompt, and text that streams in whole characters."""

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from lightning_jax.models import chat_template, gguf_vocab, token_bytes
from lightning_jax.models.gguf_vocab import TokenizerError
from lightning_jax.types import Message

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
_NUM_REMEMBERED, _MAX_REMEMBERED = 512, 2**16  # texts, and characters of one: 32 M at most
_UNLOCKED = 2**11  # characters; a longer text is encoded while other Python threads run
_NUM_TOKEN_TEXTS = 2**16  # texts of single tokens that are remembered: a few MB
_REPLACEMENT = "\ufffd"  # what decoding puts where bytes are no character, or not yet


class Tokenizer:
    """A vocabulary with its chat template; safe to share between threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        template: str | None = None,
        eos_ids: Iterable[int] = (),
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self._backend = backend
        self.template = template
        self.special_tokens = dict(special_tokens or {})  # "eos_token" -> "<|im_end|>" and such
        self.eos_ids = frozenset(eos_ids)  # each ends a response
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.added_ids = frozenset(added)  # each is found in text whole, special or not
        # The rollouts of a group all begin with one prompt.
        self._encode_once = functools.lru_cache(maxsize=_NUM_REMEMBERED)(self._encode)
        self._text_once = functools.lru_cache(maxsize=_NUM_TOKEN_TEXTS)(self._text)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids; none is added. `special` False reads "<|im_end|>" as ordinary characters.

        Texts of late are remembered. Raises ValueError for text that is no Unicode.
        """
        if len(text) > _MAX_REMEMBERED:
            return list(self._encode(text, special))
        return list(self._encode_once(text, special))

    def _encode(self, text: str, special: bool) -> tuple[int, ...]:
        backend = self._backend if special else self._plain_backend
        try:
            if len(text) <= _UNLOCKED:
                return tuple(backend.encode(text, add_special_tokens=False).ids)
            # Unlike `encode`, it lets go of the interpreter.
            return tuple(backend.encode_batch([text], add_special_tokens=False)[0].ids)
        except TypeError as error:  # what the Rust library says of half a surrogate pair
            raise ValueError(
                "the text holds half of a surrogate pair; expected valid Unicode text."
            ) from error

    @functools.cached_property
    def max_token_bytes(self) -> int | None:
        """The bytes of text that one token stands for at most, None where nothing bounds them.

        A text of more bytes than this times a number has more tokens than that number.
        """
        return token_bytes.longest(self._backend)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def token_text(self, token_id: int) -> str:
        """Return one token's text, a special one's too; recent ones are remembered."""
        return self._text_once(token_id)

    def _text(self, token_id: int) -> str:
        return self.decode([token_id], skip_special=False)

    def token_id(self, token: str) -> int | None:
        """The id of one token's text, None where the vocabulary lacks it."""
        return self._backend.token_to_id(token)

    @property
    def vocabulary(self) -> dict[str, int]:
        """The id of every token by its text, added ones too."""
        return self._backend.get_vocab(with_added_tokens=True)

    @property
    def supports_tools(self) -> bool:
        """Whether the chat template has a place for tools."""
        return self.template is not None and "tools" in self.template

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt text of a conversation. Raises chat_template.TemplateError."""
        if self.template is None:
            raise chat_template.TemplateError(
                "this model has no chat template; expected one in tokenizer_config.json, "
                "chat_template.jinja or the GGUF metadata. Use an instruct model.",
                reason="missing",
                key="chat_template",
            )
        return chat_template.render(
            self.template,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            special_tokens=self.special_tokens,
        )

    @functools.cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        # A copy, because the switch belongs to the object and other threads use the first one.
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        return backend

    @property
    def end_of_turn_id(self) -> int | None:
        """The token that the model itself ends a response with; None if it knows none."""
        named = self.token_id(self.special_tokens.get("eos_token", ""))
        return named if named in self.eos_ids else min(self.eos_ids, default=None)

    def to_json(self) -> str:
        """The whole tokenizer as a tokenizer.json's text."""
        return self._backend.to_str()

    def save(self, directory: Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json as transformers' AutoTokenizer reads."""
        self._backend.save(str(directory / "tokenizer.json"))
        settings: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **self.special_tokens,
        }
        settings["clean_up_tokenization_spaces"] = False
        if self.template is not None:
            settings["chat_template"] = self.template
        text = json.dumps(settings, indent=2, ensure_ascii=False)
        (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def from_hf(directory: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face model directory. Raises TokenizerError."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(
            f"{directory} has no tokenizer.json; expected a fast tokenizer's file beside the "
            "weights. Save it there with transformers' AutoTokenizer.",
            reason="missing",
            key=str(path),
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust library raises nothing narrower
        raise TokenizerError(
            f"{path} is not a readable tokenizer: {error}", reason="malformed", key=str(path)
        ) from error
    # What training left there would cut or lengthen every prompt.
    backend.no_truncation()
    backend.no_padding()
    settings = _read_json(directory / "tokenizer_config.json")
    special = {name: _token_text(settings[name]) for name in _NAMES if settings.get(name)}
    eos = [backend.token_to_id(special["eos_token"])] if "eos_token" in special else []
    for name in ("generation_config.json", "config.json"):
        declared = _read_json(directory / name).get("eos_token_id")
        if declared is not None:
            eos += declared if isinstance(declared, list) else [declared]
            break
    return Tokenizer(
        backend,
        template=_read_template(directory, settings),
        eos_ids=[i for i in eos if i is not None],
        special_tokens=special,
    )


def from_gguf(reader: Any) -> Tokenizer:
    """The tokenizer in the metadata of an open gguf.GGUFReader. Raises TokenizerError."""
    vocabulary = gguf_vocab.read(reader)
    return Tokenizer(
        vocabulary.backend,
        template=vocabulary.template,
        eos_ids=vocabulary.eos_ids,
        special_tokens=vocabulary.special_tokens,
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(
            f"{path} is not readable JSON: {error}", reason="malformed", key=str(path)
        ) from error


def _token_text(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _read_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


class StreamDecoder:
    """Text of a response as its tokens arrive; joined, it is that of all ids decoded at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Decoding restarts from `_context`, the last piece already given out, because some
        # vocabularies write a word's leading space only when another token precedes it.
        self._context: list[int] = []
        self._fresh: list[int] = []
        self._given = 0  # characters of the fresh text already given out

    def push(self, token_id: int) -> str:
        """The text that this token makes certain; "" for special tokens and half characters."""
        if token_id in self._tokenizer.special_ids:
            return ""
        self._fresh.append(token_id)
        text = self._fresh_text()
        # Bytes still to come can turn up to three trailing marks into one character.
        stable = text[: len(text) - min(3, len(text) - len(text.rstrip(_REPLACEMENT)))]
        if len(stable) == len(text):
            self._context, self._fresh = self._fresh, []
            given, self._given = self._given, 0
            return text[given:]
        piece = stable[self._given :]
        self._given = max(self._given, len(stable))
        return piece

    def flush(self) -> str:
        """What is left at the end: marks for the bytes that never became a character."""
        piece = self._fresh_text()[self._given :]
        self._context, self._fresh, self._given = self._context + self._fresh, [], 0
        return piece

    def _fresh_text(self) -> str:
        before = self._tokenizer.decode(self._context)
        whole = self._tokenizer.decode(self._context + self._fresh)
        # A vocabulary that falls back to bytes decodes a run of them as a whole, and so what came
        # before may read otherwise beside what is fresh.
        if whole.startswith(before):
            return whole[len(before) :]
        return self._tokenizer.decode(self._fresh)
