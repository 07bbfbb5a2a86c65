"""Tests of files of models with experts: names, stacked tensors and what is refused."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.numpy
from coded import raises_coded
from gguf_models import FLAG, NUMBER, assert_equal, variant, write_gguf

from lightning_jax.models.config import LoraConfig
from lightning_jax.models.formats.load import load_model, save_hf
from lightning_jax.models.lora import adapted_shape
from lightning_jax.models.model_files import ModelError
from lightning_jax.models.shape import Experts
from lightning_jax.settings import ConfigError

LAYER = "model.layers.1.mlp"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_hf(tmp_path / "model", variant("qwen3_moe"))
    return tmp_path / "model"


def _tensors(saved: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(saved / "model.safetensors")


def _experts(path: Path) -> Any:
    return load_model(str(path)).config.shape.blocks[1].mlp


def test_each_expert_has_a_tensor(saved: Path) -> None:
    tensors, layer = _tensors(saved), variant("qwen3_moe").params["layers_1"]
    for name in ("gate", "up", "down"):
        kernel = layer[f"experts_{name}"]["kernel"][3]
        np.testing.assert_array_equal(tensors[f"{LAYER}.experts.3.{name}_proj.weight"], kernel.T)
    assert tensors[f"{LAYER}.gate.weight"].shape == (5, 16)
    fields = json.loads((saved / "config.json").read_text())
    sizes = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "intermediate_size")
    assert [fields[name] for name in sizes] == [5, 2, 12, 24]
    assert fields["architectures"] == ["Qwen3MoeForCausalLM"] and fields["norm_topk_prob"]


def test_stacked_tensors_load_too(saved: Path) -> None:
    """The library stacks them in memory, gate before up, and may save them so."""
    tensors = _tensors(saved)
    for layer in ("model.layers.0.mlp.experts", f"{LAYER}.experts"):
        parts = {
            name: np.stack([tensors.pop(f"{layer}.{i}.{name}_proj.weight") for i in range(5)])
            for name in ("gate", "up", "down")
        }
        tensors[f"{layer}.gate_up_proj"] = np.concatenate((parts["gate"], parts["up"]), axis=1)
        tensors[f"{layer}.down_proj"] = parts["down"]
    safetensors.numpy.save_file(tensors, saved / "model.safetensors")
    assert_equal(load_model(str(saved)), variant("qwen3_moe"))


@pytest.mark.parametrize("cut", [True, False])
def test_a_lost_expert_or_one_of_another_size_is_named(saved: Path, cut: bool) -> None:
    name, tensors = f"{LAYER}.experts.4.up_proj.weight", _tensors(saved)
    lost = tensors.pop(name)
    if cut:
        tensors[name] = lost[:-1].copy()
    safetensors.numpy.save_file(tensors, saved / "model.safetensors")
    with raises_coded(ModelError, "mismatch" if cut else "missing", name):
        load_model(str(saved))


@pytest.mark.parametrize(
    ("change", "reason", "key"),
    [
        ({"mlp_only_layers": [1]}, "unsupported", "mlp_only_layers"),
        ({"decoder_sparse_step": 2}, "unsupported", "decoder_sparse_step"),
        ({"num_experts": 0}, "malformed", "num_experts"),
        ({"num_experts": None}, "missing", "num_experts"),
        ({"num_experts": 2**20}, "malformed", "num_experts"),
        ({"num_experts_per_tok": 6}, "malformed", "num_experts_per_tok"),
        ({"moe_intermediate_size": "12"}, "malformed", "moe_intermediate_size"),
        ({"num_experts": 6}, "missing", "model.layers.0.mlp.experts.5.down_proj.weight"),
        ({"model_type": "qwen2_moe"}, "unsupported", "num_experts"),
        ({"use_sliding_window": True}, "unsupported", "use_sliding_window"),
    ],
)
def test_wrong_configs_are_refused(
    saved: Path, change: dict[str, Any], reason: str, key: str
) -> None:
    path = saved / "config.json"
    fields = json.loads(path.read_text()) | change
    path.write_text(json.dumps({name: one for name, one in fields.items() if one is not None}))
    with raises_coded(ModelError, reason, key):
        load_model(str(saved))


def test_names_and_defaults_of_transformers_are_read(saved: Path) -> None:
    path = saved / "config.json"
    fields = json.loads(path.read_text())
    fields["num_local_experts"] = fields.pop("num_experts")
    del fields["norm_topk_prob"], fields["mlp_only_layers"]  # false and none
    path.write_text(json.dumps(fields))
    assert _experts(saved) == Experts(5, 2, 12, renormalise=False)


def test_gguf_files_have_all_experts_in_one_tensor(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    write_gguf(path, variant("qwen3_moe"))
    shapes = {tensor.name: list(tensor.shape) for tensor in gguf.GGUFReader(path).tensors}
    assert shapes["blk.1.ffn_up_exps.weight"] == [16, 12, 5]
    assert shapes["blk.1.ffn_gate_inp.weight"] == [16, 5]
    write_gguf(path, variant("qwen3_moe"), {"qwen3moe.expert_weights_norm": (False, FLAG)})
    assert _experts(path) == Experts(5, 2, 12, renormalise=False)
    write_gguf(path, variant("qwen3_moe"), {"qwen3moe.expert_count": (0, NUMBER)})
    with raises_coded(ModelError, "malformed", "expert_count"):
        load_model(str(path))


def test_experts_have_no_adapters() -> None:
    config = variant("qwen3_moe").config
    with raises_coded(ConfigError, "unsupported", "model.lora.targets"):
        adapted_shape(config, LoraConfig(rank=2))
    lora = LoraConfig(rank=2, targets=("q", "v"))
    assert adapted_shape(config, lora).execution.lora == lora
