"""Bytes of text that a token represents, their upper bound, and names that identify tokens."""

import functools
import json
import re
from collections.abc import Iterator
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

# Composing characters makes a text shorter, but never by a factor of 4 in bytes.
_NFC_SHRINKS = 4
_NUM_CACHED = 2**16  # tokens: a few MB
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_KEEP_ALL = ("ByteLevel", "Digits", "Metaspace", "Split", "Punctuation")


class Pieces:
    """Bytes and names of the tokens of a vocabulary. Safe to share between threads."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._steps = _parts(backend.decoder, "decoders")
        kinds = {step["type"] for step in self._steps}
        self._is_known = kinds <= {
            *("ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip")
        } and bool(kinds)
        self._by_char = _bytes_by_char() if "ByteLevel" in kinds else {}
        self._falls_back = "ByteFallback" in kinds
        self.joins_bytes, self._joins_words = kinds == {"ByteLevel"}, _joins_words(self._steps)
        self.joins = functools.lru_cache(maxsize=_NUM_CACHED)(self._joins)
        self.of = functools.lru_cache(maxsize=_NUM_CACHED)(self._of)
        self.at_start = functools.lru_cache(maxsize=_NUM_CACHED)(self._at_start)
        self.name = functools.lru_cache(maxsize=_NUM_CACHED)(self._name)

    def _joins(self, token_id: int) -> bool:
        """Return True if such tokens, decoded together, give the texts of one after another.

        Byte tokens do not: a run of them is decoded as a whole, and may be no characters.
        """
        token = self._backend.id_to_token(token_id)
        is_word = bool(self.of(token_id)) and not _BYTE_TOKEN.fullmatch(token or "")
        return self.joins_bytes or (self._joins_words and is_word)

    def _of(self, token_id: int) -> bytes:
        """Return the bytes that the token adds to a text. An unknown id adds none."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if not self._is_known:
            return self._backend.decode([token_id], skip_special_tokens=False).encode()
        if self._falls_back and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        if self._by_char and all(char in self._by_char for char in token):
            return bytes(self._by_char[char] for char in token)
        for old, new in self._replaced():
            token = token.replace(old, new)
        return token.encode()

    def _at_start(self, token_id: int) -> bytes:
        """Return the bytes that the token adds as the first one of a text.

        Vocabularies that write a blank before the first word of a text drop one there.
        """
        whole = self.of(token_id)
        if not whole.startswith(b" "):
            return whole
        decoded = self._backend.decode([token_id], skip_special_tokens=False)
        return whole if "\ufffd" in decoded else decoded.encode()

    def _name(self, token_id: int) -> str:
        r"""Return a name that no other token has.

        This is its text, blanks included. If its bytes are not whole characters, or another token
        is the usual one for the text, the name has the form `bytes:\xf0\x9f`, or `token_id:7`.
        """
        token, content = self._backend.id_to_token(token_id), self.of(token_id)
        if token is None:
            return f"token_id:{token_id}"
        if not self._is_known:
            return token
        try:
            text = content.decode()
        except UnicodeDecodeError:
            text = ""
        if text and self._usual_id(text) == token_id:
            return text
        if content and (not text or _BYTE_TOKEN.fullmatch(token)):
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
        return f"token_id:{token_id}"

    def _usual_id(self, text: str) -> int | None:
        """Return the first token that stands for exactly this text, or None."""
        spellings = (self._backend.token_to_id(spelling) for spelling in self._spellings(text))
        return next((i for i in spellings if i is not None and self.of(i) == text.encode()), None)

    def _spellings(self, text: str) -> Iterator[str]:
        """Yield the strings that may be the token of a text in the vocabulary."""
        if self._by_char:
            chars = {byte: char for char, byte in self._by_char.items()}
            yield "".join(chars[byte] for byte in text.encode())
        marked = text
        for old, new in self._replaced():
            marked = marked.replace(new, old)
        yield marked
        yield text
        if len(content := text.encode()) == 1:
            yield f"<0x{content[0]:02X}>"

    def _replaced(self) -> Iterator[tuple[str, str]]:
        """Yield the pairs of a text in tokens and its replacement in texts, such as ▁ and blank."""
        for step in self._steps:
            match step:
                case {"type": "Metaspace", "replacement": mark}:
                    yield mark, " "
                case {"type": "Replace", "pattern": {"String": old}, "content": new} if new:
                    yield old, new


def _joins_words(steps: list[dict[str, Any]]) -> bool:
    """Return True if a decoder changes each word alone, and drops at most one blank before all."""
    has_fused = False
    for step in steps:
        match step:
            case {"type": "Fuse"}:
                has_fused = True
            case {"type": "Strip", "start": 0 | 1, "stop": 0} | {"type": "ByteFallback"}:
                pass
            case {"type": "Replace" | "Metaspace"} if not has_fused:
                pass
            case _:
                return False
    return bool(steps)


def _bytes_by_char() -> dict[str, int]:
    """Return the byte of each character in tokens of a byte-level vocabulary.

    Printable characters of Latin-1 stand for themselves, the others follow from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    moved = {chr(0x100 + index): byte for index, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | moved


def longest(backend: tokenizers.Tokenizer) -> int | None:
    """Return the most bytes of text that one token can represent, or None if that is unknown.

    It is known for byte-pair encodings that can spell every byte and drop no text beforehand.
    """
    vocabulary = backend.get_vocab(with_added_tokens=True)
    shrinks = _shrinks(backend.normalizer)
    added = backend.get_added_tokens_decoder().values()
    keeps_all = (
        _spells_every_byte(backend, vocabulary)
        and all(
            part["type"] in _KEEP_ALL and part.get("behavior") != "Removed"
            for part in _parts(backend.pre_tokenizer, "pretokenizers")
        )
        and not any(token.lstrip or token.rstrip for token in added)  # these drop whitespace
    )
    if not keeps_all or shrinks is None:
        return None
    # Tokens are spelled with one character per byte or as plain text. Neither is shorter in UTF-8.
    return shrinks * max(len(token.encode()) for token in vocabulary)


def _spells_every_byte(backend: tokenizers.Tokenizer, vocabulary: dict[str, int]) -> bool:
    model: Any = backend.model
    if not isinstance(model, models.BPE):
        return False
    if model.byte_fallback:
        # Gemma's has a tab in place of its byte.
        tab = {"<0x09>"} if "\t" in vocabulary else set[str]()
        return {f"<0x{byte:02X}>" for byte in range(256)} <= vocabulary.keys() | tab
    kinds = [part["type"] for part in _parts(backend.pre_tokenizer, "pretokenizers")]
    return "ByteLevel" in kinds and set(pre_tokenizers.ByteLevel.alphabet()) <= vocabulary.keys()


def _shrinks(normalizer: Any) -> int | None:
    """Return the factor by which normalized text may be shorter, or None if that is unknown."""
    factor = 1
    for part in _parts(normalizer, "normalizers"):
        match part:
            case {"type": "NFC"}:
                factor *= _NFC_SHRINKS
            case {"type": "Prepend"}:
                pass
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if len(
                old.encode()
            ) <= len(new.encode()):
                pass
            case _:
                return None
    return factor


def _parts(step: Any, inner: str) -> list[dict[str, Any]]:
    """Return the parts of a normalizer or a pre-tokenizer, with nested sequences flattened."""
    if step is None:
        return []

    def flat(state: dict[str, Any]) -> list[dict[str, Any]]:
        if state["type"] != "Sequence":
            return [state]
        return [part for step in state[inner] for part in flat(step)]

    return flat(json.loads(step.__getstate__()))
