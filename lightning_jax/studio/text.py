"""Untrusted text of agents, models and tools made safe to print. Pure functions."""

import json
from collections.abc import Sequence
from typing import Any

from lightning_jax.models.tokenizer import StreamDecoder, Tokenizer
from lightning_jax.system.text import printable


def as_text(value: Any) -> str:
    """Format an attribute's value for people: text unchanged, anything else as JSON."""
    if isinstance(value, str):
        return printable(value)
    return printable(json.dumps(value, ensure_ascii=False, default=str))


def cut(text: str, limit: int) -> str:
    """Shorten a long text to its start and end, with the number of characters left out.

    `limit` is in characters, and 0 means no limit.
    """
    left_out = len(text) - limit
    if limit == 0 or left_out <= 0:
        return text
    tail = limit // 4
    end = text[len(text) - tail :]
    return f"{text[: limit - tail]}\n[... {left_out:,} characters omitted ...]\n{end}"


def split_text(ids: Sequence[int], at: int, tokenizer: Tokenizer) -> tuple[str, str]:
    """Return the text of the first `at` tokens and the rest of the text, with special tokens.

    A character with bytes on both sides goes to the rest.
    """
    whole = tokenizer.decode(ids, skip_special=False)
    head = tokenizer.decode(ids[:at], skip_special=False)
    size = len(head) if whole.startswith(head) else _common(head, whole)
    return printable(whole[:size]), printable(whole[size:])


def _common(a: str, b: str) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((at for at, (x, y) in pairs if x != y), min(len(a), len(b)))


def token_texts(ids: Sequence[int], tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the text that each token adds. A character of several tokens goes to the last one."""
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
