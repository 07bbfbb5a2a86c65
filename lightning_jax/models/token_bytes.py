"""Upper bound on the bytes of text that one token represents."""

import json
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

# Composing characters makes a text shorter, but never by a factor of 4 in bytes.
_NFC_SHRINKS = 4
_KEEP_ALL = ("ByteLevel", "Digits", "Metaspace", "Split", "Punctuation")


def longest(backend: tokenizers.Tokenizer) -> int | None:
    """Return the most bytes of text that one token can represent, or None if that is unknown.

    It is known for byte-pair encodings that can spell every byte and drop no text beforehand.
    """
    vocabulary = backend.get_vocab(with_added_tokens=True)
    shrinks = _shrinks(backend.normalizer)
    added = backend.get_added_tokens_decoder().values()
    keeps_all = (
        _spells_every_byte(backend, vocabulary)
        and all(_keeps_all(part) for part in _parts(backend.pre_tokenizer, "pretokenizers"))
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
        return all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
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


def _keeps_all(part: dict[str, Any]) -> bool:
    return part["type"] in _KEEP_ALL and part.get("behavior") != "Removed"


def _parts(step: Any, inner: str) -> list[dict[str, Any]]:
    """Return the parts of a normalizer or a pre-tokenizer, with nested sequences flattened."""
    if step is None:
        return []

    def flat(state: dict[str, Any]) -> list[dict[str, Any]]:
        if state["type"] != "Sequence":
            return [state]
        return [part for step in state[inner] for part in flat(step)]

    return flat(json.loads(step.__getstate__()))
