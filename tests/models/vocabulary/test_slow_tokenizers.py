"""Tests of tokenizers that have no tokenizer.json, against the libraries of their files."""

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from coded import raises_coded

from lightning_jax.models.model_files import ModelError
from lightning_jax.models.tokenizer import Tokenizer, from_hf
from lightning_jax.models.vocabulary import slow_tokenizers

TEXTS = ("the red fox", " the  hello\n\nworld", "naïve 日本 😀", "", "1234 + 5678")
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = (b"th", b"the", b" the", b"he", b"ll", b"hell", b"hello", b"12", b"34")
RANKS = {token: rank for rank, token in enumerate([*(bytes([i]) for i in range(256)), *WORDS])}

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers


def _directory(path: Path, model_type: str, settings: dict[str, Any]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": model_type, "eos_token_id": 2}))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def _agrees_after_saving(tokenizer: Tokenizer, path: Path) -> bool:
    path.mkdir()
    tokenizer.save(path)
    saved = from_hf(path)
    return all(saved.encode(text) == tokenizer.encode(text) for text in TEXTS)


# The library's own classes crash in a process that has loaded JAX. The conversion uses none.
TRAIN = """
import json, sys
import sentencepiece
corpus = ["the red fox says hello to the world", "1234 + 5678 is a sum"] * 40
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(corpus), model_prefix=sys.argv[1], vocab_size=310, model_type="bpe",
    byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
    minloglevel=2,
)
processor = sentencepiece.SentencePieceProcessor(sys.argv[1] + ".model")
print(json.dumps([processor.encode(text) for text in json.loads(sys.argv[2])]))
"""


def test_sentencepiece_encodes_as_its_library_does(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece", reason="of the extra tokenizers")
    settings = {"tokenizer_class": "LlamaTokenizer", "chat_template": "{{ messages }}"}
    directory = _directory(tmp_path / "model", "llama", settings)
    # transformers takes a first blank for the one that the library adds.
    texts = [text.lstrip() for text in TEXTS]
    command = [sys.executable, "-c", TRAIN, directory / "tokenizer", json.dumps(texts)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    ours = from_hf(directory)
    assert [ours.encode(text) for text in texts] == json.loads(done.stdout)
    assert ours.special_tokens["eos_token"] == "</s>"  # by the class alone
    assert ours.eos_ids == {2}
    assert ours.template == "{{ messages }}"
    assert _agrees_after_saving(ours, tmp_path / "saved")


def test_tiktoken_encodes_as_its_library_does(tmp_path: Path) -> None:
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "added_tokens_decoder": {str(len(RANKS)): {"content": "<|end|>", "special": True}},
    }
    directory = _directory(tmp_path / "model", "llama", settings)
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in RANKS.items())
    (directory / "tiktoken.model").write_text("".join(lines))
    special = {"<|end|>": len(RANKS)}
    theirs = tiktoken.Encoding("t", pat_str=LLAMA_3, mergeable_ranks=RANKS, special_tokens=special)
    ours = from_hf(directory)
    for text in (*TEXTS, "hello<|end|>"):
        assert ours.encode(text) == theirs.encode(text, allowed_special="all")
    assert len(RANKS) in ours.eos_ids & ours.special_ids
    assert _agrees_after_saving(ours, tmp_path / "saved")


def test_tekken_encodes_as_tiktoken_with_its_pattern(tmp_path: Path) -> None:
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    directory = _directory(tmp_path / "model", "mistral", {})
    tekken = {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(RANKS),
            "default_vocab_size": len(RANKS) + len(names),
            "default_num_special_tokens": len(names),
            "version": "v7",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for token, rank in RANKS.items()
        ],
        "special_tokens": [
            {"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(names)
        ],
    }
    (directory / "tekken.json").write_text(json.dumps(tekken))
    theirs = tiktoken.Encoding("t", pat_str=PATTERN, mergeable_ranks=RANKS, special_tokens={})
    ours = from_hf(directory)
    for text in TEXTS:
        assert ours.encode(text) == [len(names) + rank for rank in theirs.encode(text)]
    assert ours.encode("[INST]") == [3]
    assert ours.eos_ids == {2}  # as config.json says
    assert _agrees_after_saving(ours, tmp_path / "saved")


def test_what_is_missing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "tokenizer.json")
    with raises_coded(ModelError, "missing", path):
        from_hf(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\0")
    for package in ("transformers", "sentencepiece"):
        monkeypatch.setattr(slow_tokenizers, "is_installed", lambda name, p=package: name != p)
        with raises_coded(ModelError, "not_installed", path) as caught:
            from_hf(tmp_path)
        assert package in str(caught.value) and "lightning-jax[tokenizers]" in str(caught.value)


def test_files_that_cannot_be_converted_are_refused(tmp_path: Path) -> None:
    directory = _directory(tmp_path / "model", "llama", {"tokenizer_class": "LlamaTokenizer"})
    (directory / "tiktoken.model").write_bytes(b"\xff\0\xff")
    with raises_coded(ModelError, "malformed", str(directory / "tokenizer.json")):
        from_hf(directory)


def test_code_of_the_directory_never_runs(tmp_path: Path) -> None:
    settings = {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}}
    directory = _directory(tmp_path / "model", "llama", settings)
    (directory / "vocab.json").write_text("{}")
    (directory / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with raises_coded(ModelError, "malformed", str(directory / "tokenizer.json")):
        from_hf(directory)
    assert not (tmp_path / "ran").exists()
