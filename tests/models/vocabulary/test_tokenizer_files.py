"""Tests of tokens that are declared beside tokenizer.json, against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from coded import raises_coded

from lightning_jax.models.formats.load import load_model, save_hf
from lightning_jax.models.model_files import ModelError
from lightning_jax.models.tokenizer import from_hf
from lightning_jax.testing.tiny import tiny_model, tiny_tokenizer

TEXT = "a<x> <y>b<|im_end|><|im_start|>z</s>"


def _token(content: str, **flags: bool) -> dict[str, Any]:
    names = ("single_word", "lstrip", "rstrip", "normalized")
    return {"content": content, "special": True} | dict.fromkeys(names, False) | flags


def _decoder(*tokens: dict[str, Any], first: int = 259) -> dict[str, Any]:
    return {"added_tokens_decoder": {str(first + n): token for n, token in enumerate(tokens)}}


def _write(directory: Path, config: Any, special: Any = None, added: Any = None) -> None:
    tiny_tokenizer().save(directory)
    files = {"tokenizer_config": config, "special_tokens_map": special, "added_tokens": added}
    for name, fields in files.items():
        if fields is not None:
            (directory / f"{name}.json").write_text(json.dumps(fields))


CASES: dict[str, tuple[Any, ...]] = {
    "only in the config": (
        _decoder(_token("<x>"), _token("<y>", special=False)) | {"eos_token": "<x>"},
    ),
    "ids with a gap": (_decoder(_token("<x>", lstrip=True), first=300),),
    "other flags than in the vocabulary": (
        _decoder(_token("<|im_start|>", special=False, normalized=True), first=257),
    ),
    "a word of the vocabulary": (_decoder(_token("a"), first=64),),
    "only in the map": ({}, {"eos_token": "<|im_end|>"}),
    "the map comes first": ({"eos_token": "<|im_start|>"}, {"eos_token": _token("<|im_end|>")}),
    "the config comes first": (_decoder() | {"eos_token": "<x>"}, {"eos_token": "<|im_end|>"}),
    "a new token in the map": ({}, {"eos_token": "</s>", "additional_special_tokens": ["<x>"]}),
    "added tokens": ({"eos_token": "<x>"}, None, {"<x>": 260, "<y>": 259}),
    "added tokens and the map": ({}, {"eos_token": "<x>"}, {"<x>": 259, "<y>": 260}),
    "extra tokens": ({"extra_special_tokens": ["<x>"], "eos_token": "</s>", "image_token": "<y>"},),
    "additional tokens": ({"additional_special_tokens": ["<x>", "<y>"], "pad_token": "<y>"},),
    "flags that are no tokens": ({"add_bos_token": True, "add_eos_token": False},),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    _write(tmp_path, *CASES[case])
    ours, theirs = from_hf(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    added = theirs.added_tokens_decoder
    assert ours.added_ids == added.keys()
    assert ours.special_ids == {i for i, token in added.items() if token.special}
    assert {ours.token_id(token.content): i for i, token in added.items()} == {i: i for i in added}
    assert ours.encode(TEXT) == theirs(TEXT, add_special_tokens=False)["input_ids"]
    expected = set() if theirs.eos_token_id is None else {theirs.eos_token_id}
    assert ours.named_eos_ids == expected


def test_the_map_names_an_end_that_the_config_does_not(tmp_path: Path) -> None:
    _write(tmp_path, _decoder(_token("<x>")), {"eos_token": "<x>"})
    assert from_hf(tmp_path).eos_ids == {259}


@pytest.mark.parametrize(
    "fields",
    [{"added_tokens_decoder": {"a": _token("<x>")}}, {"added_tokens_decoder": {"259": 7}}],
)
def test_malformed_declarations_are_refused(fields: Any, tmp_path: Path) -> None:
    _write(tmp_path, fields)
    with raises_coded(ModelError, "malformed", "added_tokens_decoder"):
        from_hf(tmp_path)


@pytest.mark.parametrize(
    ("config", "added"),
    [
        (_decoder(_token("<x>")), None),
        ({"eos_token": "</s>"}, None),
        ({}, {"<x>": 259, "<y>": 260}),
        ({"pad_token": "[PAD]"}, None),
    ],
)
def test_tokens_beyond_the_embedding_are_refused_at_load(
    config: Any, added: Any, tmp_path: Path
) -> None:
    save_hf(tmp_path, tiny_model(num_layers=1))
    load_model(str(tmp_path))
    _write(tmp_path, config, None, added)
    with raises_coded(ModelError, "mismatch"):
        load_model(str(tmp_path))


def test_ends_of_the_files_are_lists_or_numbers(tmp_path: Path) -> None:
    _write(tmp_path, {"eos_token": "<|im_end|>"})
    for declared, ends in ([256, 257], {256, 257, 258}), (257, {257, 258}), ([-1, True], {258}):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": declared}))
        assert from_hf(tmp_path).eos_ids == ends
    (tmp_path / "generation_config.json").write_text("{}")  # so config.json counts
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [256]}))
    assert from_hf(tmp_path).eos_ids == {256, 258}


def test_a_saved_tokenizer_keeps_what_transformers_would_keep(tmp_path: Path) -> None:
    """Compare all but the class, which transformers 4 lacks, and where it came from."""
    original, saved, theirs = (tmp_path / name for name in ("original", "saved", "theirs"))
    original.mkdir()
    saved.mkdir()
    habits = {
        "model_max_length": 512,
        "padding_side": "left",
        "truncation_side": "left",
        "model_input_names": ["input_ids", "attention_mask"],
    }
    tiny_tokenizer().save(original)
    path = original / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | habits | {"eos_token": "<x>"}))
    from_hf(original).save(saved)
    transformers.AutoTokenizer.from_pretrained(original).save_pretrained(theirs)
    configs = [json.loads((at / path.name).read_text()) for at in (saved, theirs)]
    configs[0]["chat_template"], template = None, configs[0]["chat_template"]
    assert template == (theirs / "chat_template.jinja").read_text()
    apart = ("tokenizer_class", "backend", "is_local", "local_files_only", "chat_template")
    ours, others = ({k: v for k, v in c.items() if k not in apart} for c in configs)
    assert ours == others and habits.items() <= ours.items()
    loaded = transformers.AutoTokenizer.from_pretrained(saved)
    assert (loaded.model_max_length, loaded.padding_side) == (512, "left")


def test_settings_of_another_type_are_left_out(tmp_path: Path) -> None:
    _write(tmp_path, {"model_max_length": True, "padding_side": ["left"], "truncation_side": None})
    assert from_hf(tmp_path).habits == {}
