"""Tests of the bytes and names of tokens, and of the bound of a text's tokens by its bytes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from lightning_jax.models.formats.gguf_vocab import byte_level_bpe
from lightning_jax.models.vocabulary.token_bytes import Pieces, longest
from lightning_jax.testing.tiny import sentencepiece

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


def _metaspace() -> Tokenizer:
    backend = sentencepiece()
    backend.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.ByteFallback(), decoders.Metaspace()]
    )
    return backend


def _with_added(backend: Tokenizer) -> Tokenizer:
    """Add tokens whose texts other tokens have too, or that no byte-level token could have."""
    backend.add_tokens([AddedToken(text) for text in ("a b", " red", "日本", "「x▁y」", "é")])
    return backend


VOCABULARIES = {
    "byte level": lambda: _with_added(_backend()),
    "byte fallback": lambda: _with_added(sentencepiece()),
    "metaspace": _metaspace,
}


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_names_identify_tokens(vocabulary: str) -> None:
    backend = VOCABULARIES[vocabulary]()
    pieces, ids = Pieces(backend), range(backend.get_vocab_size() + 3)  # the last are no tokens
    assert len({pieces.name(i) for i in ids}) == len(ids)
    for i in ids[:-3]:
        name, content = pieces.name(i), pieces.of(i)
        known = name.startswith(("token_id:", "bytes:"))
        assert known or name.encode() == content != b""
    assert {pieces.name(i) for i in ids[-3:]} == {f"token_id:{i}" for i in ids[-3:]}


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_bytes_of_tokens_join_to_their_text(vocabulary: str, data: st.DataObject) -> None:
    backend = VOCABULARIES[vocabulary]()
    pieces, top = Pieces(backend), backend.get_vocab_size() - 1
    ids = data.draw(st.lists(st.integers(0, top), min_size=1, max_size=8))
    joined = pieces.at_start(ids[0]) + b"".join(map(pieces.of, ids[1:]))
    decoded = backend.decode(ids, skip_special_tokens=False)
    if "\ufffd" not in decoded:
        assert joined.decode() == decoded


def test_names_of_known_tokens() -> None:
    pieces, backend = Pieces(sentencepiece()), sentencepiece()
    names = {
        token: pieces.name(backend.token_to_id(token))
        for token in ("▁the", "the", "▁", "<0x20>", "a", "<0x61>", "<0x0A>", "<0xF0>", "</s>")
    }
    assert names == {
        "▁the": " the", "the": "the", "▁": " ", "<0x20>": r"bytes:\x20", "a": "a",
        "<0x61>": r"bytes:\x61", "<0x0A>": "\n", "<0xF0>": r"bytes:\xf0", "</s>": "</s>",
    }  # fmt: skip
    assert pieces.of(backend.token_to_id("<0xF0>")) == b"\xf0"
    the = backend.token_to_id("▁the")
    assert (pieces.of(the), pieces.at_start(the)) == (b" the", b"the")


def test_a_vocabulary_of_whole_words_has_names_too() -> None:
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()  # type: ignore[assignment]
    pieces = Pieces(backend)
    assert [pieces.name(i) for i in range(4)] == ["[UNK]", "a", "##b", "token_id:3"]
    assert (pieces.of(1), pieces.of(3)) == (b"a", b"")
