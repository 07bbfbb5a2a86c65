"""Tests of files whose weights and fields contradict each other, before any weight is read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from coded import raises_coded
from gguf_models import NUMBER, variant, write_gguf

from lightning_jax.models.families.table import FAMILIES
from lightning_jax.models.formats import gguf
from lightning_jax.models.formats.load import load_model, save_hf
from lightning_jax.models.formats.param_names import named_params
from lightning_jax.models.formats.weight_files import Weights
from lightning_jax.models.model_files import ModelError

NORM, EXTRA = "model.norm.weight", "model.layers.0.self_attn.other_proj.bias"
IN_GGUF = sorted(FAMILIES.keys() - {"granitemoehybrid"})


@pytest.fixture(autouse=True)
def _reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test fail if the numbers of a weight are read."""

    def read(*args: Any) -> None:
        pytest.fail("weights were read")

    monkeypatch.setattr(Weights, "read", read)
    monkeypatch.setattr(gguf.NamedParam, "from_rows", read)


def _refused(directory: Path, reason: str, key: str) -> None:
    with raises_coded(ModelError, reason, key) as caught:
        load_model(str(directory))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_contradict_the_config_are_refused(family: str, tmp_path: Path) -> None:
    model = variant(family)
    save_hf(tmp_path, model)
    path, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    arrays, fields = safetensors.numpy.load_file(path), json.loads(config.read_text())

    def write(changed: dict[str, Any], **others: Any) -> None:
        safetensors.numpy.save_file(changed, path)
        config.write_text(json.dumps(fields | others))

    write({name: array for name, array in arrays.items() if name != NORM})
    _refused(tmp_path, "missing", NORM)
    write(arrays | {EXTRA: np.zeros(3, np.float32)})
    _refused(tmp_path, "unsupported", EXTRA)
    write(arrays | {NORM: np.zeros(16, np.uint8)})
    _refused(tmp_path, "unsupported", NORM)
    write(arrays | {NORM: np.zeros(17, np.float32)})
    _refused(tmp_path, "mismatch", NORM)
    last = f"model.layers.{model.config.shape.num_layers - 1}.input_layernorm.weight"
    if last in arrays:
        write(arrays, num_hidden_layers=model.config.shape.num_layers - 1)
        _refused(tmp_path, "unsupported", last)
    write(arrays, model_type="mamba2", num_experts=0)
    _refused(tmp_path, "unsupported", "model_type")


@pytest.mark.parametrize("family", IN_GGUF)
def test_tensors_that_contradict_the_metadata_are_refused(family: str, tmp_path: Path) -> None:
    model, path = variant(family), tmp_path / "model.gguf"
    names = {param.gguf.name for param in named_params(model.config.shape)}
    norm, extra = "output_norm.weight", "blk.0.attn_other.bias"
    kept = names - {norm}
    write_gguf(path, model, kept=kept)
    _refused(path, "missing", norm)
    write_gguf(path, model, tensors={extra: np.zeros(3, np.float32)})
    _refused(path, "unsupported", extra)
    size = model.config.shape.embed_dim
    write_gguf(path, model, kept=kept, tensors={norm: np.zeros(size, np.int32)})
    _refused(path, "unsupported", norm)
    write_gguf(path, model, kept=kept, tensors={norm: np.zeros(size + 1, np.float32)})
    _refused(path, "mismatch", norm)
    prefix = FAMILIES[family].gguf or family
    write_gguf(path, model, {f"{prefix}.block_count": (1, NUMBER)})
    layers = {name for name in names if name.startswith("blk.") and name.split(".")[1] != "0"}
    _refused(path, "unsupported", min(layers))
    write_gguf(path, model, architecture="granitehybrid")
    experts = "granitehybrid.expert_count" if FAMILIES[family].has_experts else None
    _refused(path, "unsupported", experts or "general.architecture")


def test_weights_beside_the_decoder_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head for rewards, and the rotary frequencies of old files."""
    monkeypatch.undo()
    model = variant("llama")
    save_hf(tmp_path, model)
    path = tmp_path / "model.safetensors"
    arrays = safetensors.numpy.load_file(path)
    for name in ("v_head.summary.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"):
        arrays[name] = np.zeros(3, np.float32)
    safetensors.numpy.save_file(arrays, path)
    assert load_model(str(tmp_path)).config == model.config
