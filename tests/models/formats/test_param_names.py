"""Tests of parameters whose rows share a tensor of a file."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from coded import raises_coded
from gguf_models import assert_equal, variant, write_gguf

from lightning_jax.models.families.family import Weight
from lightning_jax.models.families.table import FAMILIES
from lightning_jax.models.formats.load import load_model, save_hf
from lightning_jax.models.formats.param_names import named_params
from lightning_jax.models.model_files import ModelError

QKV, GATE_UP = "model.layers.1.self_attn.qkv_proj.weight", "model.layers.1.mlp.gate_up_proj.weight"


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Qwen3 store queries, keys and values in one tensor, and gate and up in one."""
    family = FAMILIES["qwen3"]
    attention = Weight("model.layers.{layer}.self_attn.qkv_proj", "blk.{layer}.attn_qkv")
    mlp = dataclasses.replace(
        family.weights["gate"], config="model.layers.{layer}.mlp.gate_up_proj"
    )
    weights = {**family.weights, **dict.fromkeys("qkv", attention), "gate": mlp}
    weights["up"] = dataclasses.replace(family.weights["up"], config=mlp.config)
    monkeypatch.setitem(FAMILIES, "qwen3", dataclasses.replace(family, weights=weights))


@pytest.mark.usefixtures("fused")
def test_rows_of_one_tensor_are_split_and_joined(tmp_path: Path) -> None:
    model = variant("qwen3")
    save_hf(tmp_path / "model", model)
    assert_equal(load_model(str(tmp_path / "model")), model)
    tensors = safetensors.numpy.load_file(tmp_path / "model" / "model.safetensors")
    layer = model.params["layers_1"]
    joined = np.concatenate([np.asarray(layer[name]["kernel"]).T for name in ("q", "k", "v")])
    np.testing.assert_array_equal(tensors[QKV], joined)
    gate_up = np.concatenate([np.asarray(layer[name]["kernel"]).T for name in ("gate", "up")])
    np.testing.assert_array_equal(tensors[GATE_UP], gate_up)
    assert "model.layers.1.self_attn.q_proj.weight" not in tensors


@pytest.mark.usefixtures("fused")
def test_a_shared_tensor_of_another_size_is_refused(tmp_path: Path) -> None:
    save_hf(tmp_path / "model", variant("qwen3"))
    path = tmp_path / "model" / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    safetensors.numpy.save_file(tensors | {QKV: tensors[QKV][:-1].copy()}, path)
    with raises_coded(ModelError, "mismatch", QKV):
        load_model(str(tmp_path / "model"))


@pytest.mark.usefixtures("fused")
def test_rows_of_one_gguf_tensor_are_split(tmp_path: Path) -> None:
    model = variant("qwen3")
    places = [param.gguf for param in named_params(model.config.shape)]
    assert {place.total for place in places if "attn_qkv" in place.name} == {48}
    write_gguf(tmp_path / "a.gguf", model)
    assert_equal(load_model(str(tmp_path / "a.gguf")), model)
