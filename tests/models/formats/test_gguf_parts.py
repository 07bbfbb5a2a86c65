"""Tests of GGUF models in several files, and of files that are not a whole dense model."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from coded import raises_coded
from test_load import TINY, _assert_equal, _variant, _write_gguf

from lightning_jax.models.formats.find import load_tokenizer
from lightning_jax.models.formats.load import load_model, load_shape
from lightning_jax.models.formats.param_names import named_params
from lightning_jax.models.model_files import ModelError


def _split(path: Path, number: int) -> list[Path]:
    """Write a model in parts. Only the metadata of the first counts."""
    model = _variant("qwen2")
    names = sorted(param.gguf for param in named_params(model.config.shape))
    parts = []
    for part in range(number):
        parts.append(path.with_name(f"{path.name}-{part + 1:05}-of-{number:05}.gguf"))
        number_it = partial(_number, part=part, number=number, tensors=len(names))
        _write_gguf(parts[-1], model, number_it, names[part::number])
    return parts


def _number(writer: Any, part: int, number: int, tensors: int) -> None:
    writer.add_uint16("split.no", part)
    writer.add_uint16("split.count", number)
    writer.add_int32("split.tensors.count", tensors)


@pytest.mark.parametrize("named", [0, 2])
def test_parts_are_read_together(named: int, tmp_path: Path) -> None:
    parts = _split(tmp_path / "model", 3)
    name = str(parts[named])
    _assert_equal(load_model(name), _variant("qwen2"))
    assert load_shape(name) == _variant("qwen2").config.shape
    assert load_tokenizer(name).eos_ids == {258}


def test_a_missing_or_foreign_part_is_named(tmp_path: Path) -> None:
    parts = _split(tmp_path / "model", 3)
    contents = parts[1].read_bytes()
    parts[1].write_bytes(parts[2].read_bytes())
    with raises_coded(ModelError, "split", "split.no"):
        load_model(str(parts[0]))
    parts[1].unlink()
    for path in (parts[0], parts[2]):
        with raises_coded(ModelError, "split", parts[1].name):
            load_model(str(path))
    parts[1].write_bytes(contents)
    renamed = parts[0].rename(tmp_path / "model.gguf")
    with raises_coded(ModelError, "split", "split.count"):
        load_model(str(renamed))


def test_a_single_file_may_have_any_name(tmp_path: Path) -> None:
    for name in ("model-00001-of-00002.gguf", "sha256-0a1b", "MODEL.GGUF"):
        _write_gguf(tmp_path / name, _variant("qwen2"))
        _assert_equal(load_model(str(tmp_path / name)), _variant("qwen2"))


@pytest.mark.parametrize(
    ("more", "key"),
    [
        (lambda writer: writer.add_uint32("qwen2.expert_count", 8), "qwen2.expert_count"),
        (lambda writer: writer.add_tensor("blk.0.ffn_up_exps.weight", np.zeros((2, 4, 4), "f4")),
         "blk.0.ffn_up_exps.weight"),
        (lambda writer: writer.add_type("adapter"), "general.type"),
    ],
)  # fmt: skip
def test_experts_and_adapters_are_named(more: Callable, key: str, tmp_path: Path) -> None:
    _write_gguf(tmp_path / "a.gguf", _variant("qwen2"), more)
    with raises_coded(ModelError, "unsupported", key):
        load_model(str(tmp_path / "a.gguf"))


def test_another_architecture_of_experts_is_named_too(tmp_path: Path) -> None:
    config = TINY.config.with_shape(family="qwen3moe")
    _write_gguf(tmp_path / "a.gguf", dataclasses.replace(TINY, config=config))
    with raises_coded(ModelError, "unsupported") as caught:
        load_model(str(tmp_path / "a.gguf"))
    assert "mixture of experts" in str(caught.value)


def test_a_file_without_its_embedding_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "qwen2")
    writer.add_uint32("qwen2.embedding_length", 16)
    writer.add_uint32("qwen2.attention.head_count", 2)
    writer.add_tensor("output_norm.weight", np.zeros(16, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with raises_coded(ModelError, "missing", "token_embd.weight"):
        load_model(str(tmp_path / "a.gguf"))


@pytest.mark.parametrize(("adds", "added"), [(None, []), (False, []), (True, [258])])
def test_the_file_says_whether_bos_is_added(adds: bool | None, added: list, tmp_path: Path) -> None:
    def more(writer: Any) -> None:
        writer.add_bos_token_id(258)
        if adds is not None:
            writer.add_add_bos_token(adds)

    _write_gguf(tmp_path / "a.gguf", _variant("qwen2"), more)
    tokenizer = load_tokenizer(str(tmp_path / "a.gguf"))
    assert tokenizer.encode_text("hi") == [*added, *tokenizer.encode("hi")]
