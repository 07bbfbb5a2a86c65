"""Tests of GGUF models in several files, and of files that are not a whole dense model."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from coded import raises_coded
from gguf_models import FLAG, NUMBER, SIGNED, TEXT, TINY, assert_equal, variant, write_gguf

from lightning_jax.models.formats.find import load_tokenizer
from lightning_jax.models.formats.load import load_model, load_shape
from lightning_jax.models.formats.param_names import named_params
from lightning_jax.models.model_files import ModelError

SHORT = gguf.GGUFValueType.UINT16
EXPERTS = "blk.0.ffn_up_exps.weight"


def _split(path: Path, number: int) -> list[Path]:
    """Write a model in parts. Only the metadata of the first counts."""
    model = variant("qwen2")
    names = sorted(param.gguf.name for param in named_params(model.config.shape))
    parts = []
    counts = {"split.count": (number, SHORT), "split.tensors.count": (len(names), SIGNED)}
    for part in range(number):
        parts.append(path.with_name(f"{path.name}-{part + 1:05}-of-{number:05}.gguf"))
        numbers = counts | {"split.no": (part, SHORT)}
        write_gguf(parts[-1], model, numbers, kept=names[part::number])
    return parts


@pytest.mark.parametrize("named", [0, 2])
def test_parts_are_read_together(named: int, tmp_path: Path) -> None:
    parts = _split(tmp_path / "model", 3)
    name = str(parts[named])
    assert_equal(load_model(name), variant("qwen2"))
    assert load_shape(name) == variant("qwen2").config.shape
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
        write_gguf(tmp_path / name, variant("qwen2"))
        assert_equal(load_model(str(tmp_path / name)), variant("qwen2"))


@pytest.mark.parametrize(
    ("key", "more"),
    [
        ("qwen2.expert_count", {"fields": {"qwen2.expert_count": (8, NUMBER)}}),
        (EXPERTS, {"tensors": {EXPERTS: np.zeros((2, 4, 4), np.float32)}}),
        ("general.type", {"fields": {"general.type": ("adapter", TEXT)}}),
    ],
)
def test_experts_and_adapters_are_named(key: str, more: Any, tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", variant("qwen2"), **more)
    with raises_coded(ModelError, "unsupported", key):
        load_model(str(tmp_path / "a.gguf"))


def test_another_architecture_of_experts_is_named_too(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", TINY, architecture="qwen2moe")
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
    fields = {"tokenizer.ggml.bos_token_id": (258, NUMBER)}
    if adds is not None:
        fields["tokenizer.ggml.add_bos_token"] = (adds, FLAG)
    write_gguf(tmp_path / "a.gguf", variant("qwen2"), fields)
    tokenizer = load_tokenizer(str(tmp_path / "a.gguf"))
    assert tokenizer.encode_text("hi") == [*added, *tokenizer.encode("hi")]
