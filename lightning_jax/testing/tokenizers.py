"""Tokenizers for tests, made in memory."""

import tokenizers
from tokenizers import decoders, models, normalizers

_SPECIAL = ("<unk>", "<s>", "</s>")
_BYTES = (*b" \n", *range(ord("a"), ord("z") + 1), *range(0x80, 0xF5))  # characters need no others
_WORDS = ("▁the", "▁red", "▁fox", "the", "red")


def sentencepiece() -> tokenizers.Tokenizer:
    """Return a small vocabulary like Llama 2's: ▁ for a blank, and bytes where a word is unknown.

    It writes a blank before the first word of a text, and drops it when decoding.
    """
    names = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in _BYTES), "▁"]
    names += [chr(code) for code in range(ord("a"), ord("z") + 1)]
    vocabulary, merges = {name: index for index, name in enumerate(names)}, []
    for word in _WORDS:
        for size in range(2, len(word) + 1):
            if word[:size] not in vocabulary:
                merges.append((word[: size - 1], word[size - 1]))
                vocabulary[word[:size]] = len(vocabulary)
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(  # type: ignore[assignment]
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(  # type: ignore[assignment]
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_tokens(
        [tokenizers.AddedToken(name, special=True, normalized=False) for name in _SPECIAL]
    )
    return backend
