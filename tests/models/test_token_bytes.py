"""Tests that the bound of a text's tokens by its bytes holds, and is None if it might not."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from lightning_jax.models.formats.gguf_vocab import byte_level_bpe
from lightning_jax.models.token_bytes import longest

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def _backend() -> Tokenizer:
    backend = byte_level_bpe([*ALPHABET, "ab", "abab", "Ã©"], ["a b", "ab ab", "Ã ©"], "gpt-2")
    backend.add_tokens([AddedToken("<|im_end|>", special=True, normalized=False)])
    return backend


def test_longest_token_of_a_byte_level_vocabulary() -> None:
    assert longest(_backend()) == len("<|im_end|>")


@settings(deadline=None, max_examples=200)
@given(text=st.text(max_size=60), nfc=st.booleans())
def test_text_has_no_fewer_tokens_than_its_bytes_say(text: str, nfc: bool) -> None:
    backend = _backend()
    if nfc:
        backend.normalizer = normalizers.NFC()  # type: ignore[assignment]
    bound = longest(backend)
    assert bound is not None
    assert len(text.encode()) <= bound * len(backend.encode(text).ids)


def _stripping(backend: Tokenizer) -> None:
    backend.add_tokens([AddedToken("<mask>", lstrip=True)])


def _lowercasing(backend: Tokenizer) -> None:
    backend.normalizer = normalizers.Lowercase()  # type: ignore[assignment]


def _dropping_blanks(backend: Tokenizer) -> None:
    backend.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]


@pytest.mark.parametrize("change", [_stripping, _lowercasing, _dropping_blanks])
def test_no_bound_where_text_may_vanish(change) -> None:
    backend = _backend()
    change(backend)
    assert longest(backend) is None


def test_no_bound_for_words_that_are_unknown_as_a_whole() -> None:
    assert longest(Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))) is None
