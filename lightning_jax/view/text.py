"""Text of strangers, models and tools made fit to print. Pure functions."""

import json
from collections.abc import Sequence
from typing import Any

from lightning_jax.models.tokenizer import StreamDecoder, Tokenizer

# Control characters move a terminal's cursor or write to its clipboard; those of writing direction
# turn around what follows; half a surrogate pair cannot be written in UTF-8.
_DIRECTIONS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
_SURROGATES = range(0xD800, 0xE000)
_SIGNS = (
    {code: "\ufffd" for code in (*range(0x80, 0xA0), *_DIRECTIONS, *_SURROGATES)}
    | {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n"}
    | {0x7F: "\u2421"}
)


def printable(text: str) -> str:
    """The text with a visible sign in the place of each control character.

    "a\\x1b[2J" becomes "a␛[2J"; line ends become "\\n".
    """
    return text.replace("\r\n", "\n").translate(_SIGNS)


def as_text(value: Any) -> str:
    """An attribute's value for people: text as it is, all else as JSON."""
    if isinstance(value, str):
        return printable(value)
    return printable(json.dumps(value, ensure_ascii=False, default=str))


def cut(text: str, limit: int) -> str:
    """Beginning and end of a text that is too long, and how much is left out between them.

    `limit` is in characters; 0: all.
    """
    left_out = len(text) - limit
    if limit == 0 or left_out <= 0:
        return text
    tail = limit // 4
    end = text[len(text) - tail :]
    return f"{text[: limit - tail]}\n[... {left_out:,} characters left out ...]\n{end}"


def split_text(ids: Sequence[int], at: int, tokenizer: Tokenizer) -> tuple[str, str]:
    """The text of the first `at` tokens and the rest of the whole text, with special tokens.

    A character whose bytes lie on both sides goes to the rest.
    """
    whole = tokenizer.decode(ids, skip_special=False)
    head = tokenizer.decode(ids[:at], skip_special=False)
    size = len(head) if whole.startswith(head) else _common(head, whole)
    return printable(whole[:size]), printable(whole[size:])


def _common(a: str, b: str) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((at for at, (x, y) in pairs if x != y), min(len(a), len(b)))


def token_texts(ids: Sequence[int], tokenizer: Tokenizer) -> tuple[str, ...]:
    """What each token adds to the text; a character of several tokens is the last one's."""
    decoder = StreamDecoder(tokenizer)
    texts = []
    for token_id in ids:
        if token_id in tokenizer.special_ids:
            texts.append(decoder.flush() + tokenizer.decode([token_id], skip_special=False))
            decoder = StreamDecoder(tokenizer)
        else:
            texts.append(decoder.push(token_id))
    if texts:
        texts[-1] += decoder.flush()
    return tuple(printable(text) for text in texts)
