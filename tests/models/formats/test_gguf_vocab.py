"""Tests of SentencePiece vocabularies in GGUF files, against its library and worked by hand."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from coded import raises_coded
from gguf_models import ARRAY, FLAG, NUMBER, REAL, SIGNED, TEXT, variant, write_gguf

from lightning_jax.models.formats.find import load_tokenizer
from lightning_jax.models.model_files import ModelError
from lightning_jax.models.tokenizer import StreamDecoder, Tokenizer, from_hf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# Gemma's order: named tokens, user-defined ones, bytes, then tokens by rank and single characters.
NAMED = ["<pad>", "<eos>", "<bos>", "<unk>", "<end_of_turn>"]
WORDS = ["ab", "bc", "▁a", "abc", "▁abc", "a", "b", "c", "▁", "<", ">"]
TOKENS = [*NAMED, "\n", "\n\n", "  ", "   ", *BYTES, *WORDS]
TYPES = [CONTROL] * 3 + [UNKNOWN, CONTROL] + 4 * [USER_DEFINED] + 256 * [BYTE] + 11 * [NORMAL]
SCORES = 9 * [-1000.0] + 256 * [0.0] + [-float(i) for i in range(11)]
PAD, EOS, BOS, UNK, TURN, LINE, LINES, TWO, THREE, FIRST_BYTE = range(10)
AB, BC, BLANK_A, ABC, BLANK_ABC, A, B, C, BLANK, LESS, MORE = range(265, 276)


def _fields(tokens: list[str], types: list[int], scores: list[float]) -> dict[str, tuple[Any, ...]]:
    return {
        "tokenizer.ggml.model": ("llama", TEXT),
        "tokenizer.ggml.pre": ("default", TEXT),
        "tokenizer.ggml.tokens": (tokens, ARRAY, TEXT),
        "tokenizer.ggml.token_type": (types, ARRAY, SIGNED),
        "tokenizer.ggml.scores": (scores, ARRAY, REAL),
        "tokenizer.ggml.bos_token_id": (BOS, NUMBER),
        "tokenizer.ggml.eos_token_id": (EOS, NUMBER),
        "tokenizer.ggml.unknown_token_id": (UNK, NUMBER),
        "tokenizer.ggml.add_space_prefix": (False, FLAG),
    }


FIELDS = _fields(TOKENS, TYPES, SCORES)


def _tokenizer(path: Path, **changes: tuple[Any, ...]) -> Tokenizer:
    fields = FIELDS | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    write_gguf(path / "a.gguf", variant("gemma3_text"), fields)
    return load_tokenizer(str(path / "a.gguf"))


def _bytes(text: str) -> list[int]:
    return [FIRST_BYTE + byte for byte in text.encode()]


CASES = [
    ("abc", [ABC]),  # ab is joined first, then abc
    ("abcbc", [ABC, BC]),  # of all pairs ab has the highest score
    ("cab abc", [C, AB, BLANK_ABC]),
    ("a  b", [A, TWO, B]),  # blanks are user-defined, so none is left for ▁b
    ("   a    b", [THREE, A, THREE, BLANK, B]),
    ("a\n\n\nb", [A, LINES, LINE, B]),
    ("a\tb", [A, *_bytes("\t"), B]),
    ("é你", _bytes("é你")),  # in no token
    ("ab<end_of_turn>\nc", [AB, TURN, LINE, C]),
    ("<0x41>", [LESS, *_bytes("0x41"), MORE]),  # the name of a byte is text
    ("", []),
]


@pytest.mark.parametrize(("text", "ids"), CASES)
def test_texts_are_encoded_as_worked_by_hand(text: str, ids: list[int], tmp_path: Path) -> None:
    tokenizer = _tokenizer(tmp_path)
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids, skip_special=False) == text
    tokenizer.save(tmp_path)
    assert from_hf(tmp_path).encode(text) == ids


def test_special_tokens_and_ends(tmp_path: Path) -> None:
    tokenizer = _tokenizer(tmp_path)
    assert tokenizer.eos_ids >= {EOS, TURN}
    assert tokenizer.special_tokens["bos_token"] == "<bos>"
    assert tokenizer.special_ids == {PAD, EOS, BOS, UNK, TURN}
    assert tokenizer.encode_text("a") == [BOS, A]
    spelled = tokenizer.encode("a<end_of_turn>", special=False)
    assert spelled[0] == A and not {*spelled} & tokenizer.special_ids
    assert tokenizer.decode(spelled) == "a<end_of_turn>"
    without = _tokenizer(tmp_path, add_bos_token=(False, FLAG))
    assert without.encode_text("a") == [A]


def test_a_blank_before_a_text_is_the_default(tmp_path: Path) -> None:
    tokenizer = _tokenizer(tmp_path, add_space_prefix=(True, FLAG))
    ids = [BLANK_ABC, TWO, C, AB]
    assert tokenizer.encode("abc  cab") == ids
    assert tokenizer.decode(ids) == "abc  cab"


def test_a_tab_may_begin_a_token(tmp_path: Path) -> None:
    """No token is a tab, so its byte stands for it."""
    more = {"tokens": ([*TOKENS, "\ta"], ARRAY, TEXT), "token_type": ([*TYPES, 1], ARRAY, SIGNED)}
    tokenizer = _tokenizer(tmp_path, **more, scores=([*SCORES, -11.0], ARRAY, REAL))
    ids = [*_bytes("\t"), len(TOKENS), B]
    assert tokenizer.encode("\t\tab") == [*_bytes("\t\t"), AB]  # of a higher score
    assert tokenizer.encode("\t\tacb")[:2] == ids[:2]
    assert tokenizer.decode(ids) == "\t\tab"
    assert tokenizer.max_token_bytes == len("<end_of_turn>")


def test_bytes_of_a_character_are_streamed_whole(tmp_path: Path) -> None:
    tokenizer = _tokenizer(tmp_path)
    decoder = StreamDecoder(tokenizer)
    assert [decoder.push(i) for i in [*_bytes("é"), BLANK_ABC]] == ["", "é", " abc"]
    assert tokenizer.max_token_bytes == len("<end_of_turn>")


@pytest.mark.parametrize(
    ("change", "reason", "key"),
    [
        ({"scores": ([0.0], ARRAY, REAL)}, "malformed", "scores"),
        ({"scores": ([float("nan")] * len(TOKENS), ARRAY, REAL)}, "malformed", "scores"),
        ({"scores": (["a"] * len(TOKENS), ARRAY, TEXT)}, "malformed", "scores"),
        ({"token_type": ([1], ARRAY, SIGNED)}, "malformed", "token_type"),
        ({"model": ("t5", TEXT)}, "unsupported", "model"),
        ({"add_space_prefix": ("no", TEXT)}, "malformed", "add_space_prefix"),
    ],
)
def test_wrong_vocabularies_are_refused(
    change: dict[str, tuple[Any, ...]], reason: str, key: str, tmp_path: Path
) -> None:
    with raises_coded(ModelError, reason, f"tokenizer.ggml.{key}"):
        _tokenizer(tmp_path, **change)


# The library crashes in a process that has loaded JAX.
TRAIN = """
import json, sys
import sentencepiece
corpus = ["the red fox\\tsays\\thello to the world", "1234 + 5678\\t\\tis a sum"] * 40
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(corpus), model_prefix=sys.argv[1], vocab_size=330, model_type="bpe",
    byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
    add_dummy_prefix=sys.argv[3] == "prefix", minloglevel=2, pad_id=3,
    user_defined_symbols=["\\n", "\\n\\n", "\\u2581\\u2581", "\\u2581\\u2581\\u2581", "<table>"],
)
sp = sentencepiece.SentencePieceProcessor(sys.argv[1] + ".model")
ids = range(sp.vocab_size())
kinds = [(sp.IsUnknown, 2), (sp.IsControl, 3), (sp.IsByte, 6)]
types = [next((kind for is_kind, kind in kinds if is_kind(i)), 1) for i in ids]
print(json.dumps({
    "tokens": [sp.IdToPiece(i) for i in ids], "types": types,
    "scores": [sp.GetScore(i) for i in ids],
    "encoded": [sp.encode(text) for text in json.loads(sys.argv[2])],
}))
"""
TEXTS = [
    *("the red fox", "says hello\n\nworld\n", "naïve 日本 😀", "1234 + 5678", "\t\ta\tb\t\tis"),
    *("the    red     fox", "a<table>  the", " hello", "  the\n\n\n  red", "the foxes' theory"),
]


@pytest.mark.skipif(
    importlib.util.find_spec("sentencepiece") is None, reason="of the extra tokenizers"
)
@pytest.mark.parametrize("prefix", ["prefix", "none"])
def test_encodes_as_sentencepiece_does(prefix: str, tmp_path: Path) -> None:
    # After an added token, the library adds no blank, and llama.cpp does.
    texts = [text for text in TEXTS if prefix == "none" or not re.search("[\n<]|  ", text)]
    command = [sys.executable, "-c", TRAIN, tmp_path / "trained", json.dumps(texts), prefix]
    done = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    user_defined = {"\n", "\n\n", "▁▁", "▁▁▁", "<table>"}
    types = [
        USER_DEFINED if token in user_defined else kind
        for token, kind in zip(done["tokens"], done["types"], strict=True)
    ]
    pairs = zip(done["tokens"], types, strict=True)
    written = [t.replace("▁", " ") if kind == USER_DEFINED else t for t, kind in pairs]
    names = ("<s>", "</s>", "<unk>")
    bos, eos, unknown = ((done["tokens"].index(name), NUMBER) for name in names)
    fields = _fields(written, types, done["scores"]) | {
        "tokenizer.ggml.bos_token_id": bos,
        "tokenizer.ggml.eos_token_id": eos,
        "tokenizer.ggml.unknown_token_id": unknown,
        "tokenizer.ggml.add_space_prefix": (prefix == "prefix", FLAG),
    }
    write_gguf(tmp_path / "a.gguf", variant("gemma3_text"), fields)
    ours = load_tokenizer(str(tmp_path / "a.gguf"))
    assert [ours.encode(text) for text in texts] == done["encoded"]
    assert [ours.decode(ids) for ids in done["encoded"]] == texts
