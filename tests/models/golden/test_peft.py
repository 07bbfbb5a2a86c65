"""Tests of exported adapters against peft's, with arrays from golden/make_peft_golden.py."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from test_golden import GOLDEN, _logits

from lightning_jax.models.config import LoraConfig
from lightning_jax.models.formats import huggingface
from lightning_jax.models.formats.load import LoadedModel
from lightning_jax.models.formats.param_names import unflatten
from lightning_jax.models.lora import merged, overlay, write_peft
from lightning_jax.models.shape import DecoderConfig, Execution
from lightning_jax.testing.tiny import tiny_tokenizer

OURS = {
    "self_attn.q_proj": "q", "self_attn.k_proj": "k", "self_attn.v_proj": "v",
    "self_attn.o_proj": "o", "mlp.gate_proj": "gate", "mlp.up_proj": "up", "mlp.down_proj": "down",
}  # fmt: skip


def _adapters(tensors: dict[str, np.ndarray]) -> dict:
    """Convert peft's tensors to our tree, with names spelled out here."""
    leaves = {}
    for name, tensor in tensors.items():
        layer, module, leaf = (
            name.removeprefix("base_model.model.model.layers.")
            .removesuffix(".weight")
            .replace(".self_attn", "|self_attn").replace(".mlp", "|mlp").replace(".lora", "|lora")
            .split("|")
        )  # fmt: skip
        leaves[(f"layers_{layer}", OURS[module], leaf.lower())] = jnp.asarray(tensor.T)
    return unflatten(leaves)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_adapters_mean_and_are_written_what_peft_means_and_writes(family: str, tmp_path: Path):
    golden, theirs = (dict(np.load(GOLDEN / f"{stem}{family}.npz")) for stem in ("", "peft_"))
    fields = json.loads((GOLDEN / f"peft_{family}.json").read_text())
    tokens, logits = golden.pop("tokens"), theirs.pop("logits")
    golden.pop("logits")
    (tmp_path / "config.json").write_bytes((GOLDEN / f"{family}.json").read_bytes())
    safetensors.numpy.save_file(golden, tmp_path / "model.safetensors")
    shape = huggingface.read_shape(tmp_path)
    modules = {name.rpartition(".")[2]: ours for name, ours in OURS.items()}
    targets = tuple(modules[name] for name in fields["target_modules"])
    lora = LoraConfig(rank=fields["r"], alpha=float(fields["lora_alpha"]), targets=targets)
    params = overlay(huggingface.read_params(tmp_path, shape, "float32"), _adapters(theirs))
    config = DecoderConfig(shape, Execution(lora=lora))

    assert np.abs(logits).max() > 1.0
    ours = _logits(params, config, jnp.asarray(tokens))[:, ::15]
    np.testing.assert_allclose(ours, logits, atol=1e-4)
    whole = merged(LoadedModel(family, config, params, tiny_tokenizer()))
    np.testing.assert_allclose(
        _logits(whole.params, whole.config, jnp.asarray(tokens))[:, ::15], logits, atol=1e-4
    )

    write_peft(tmp_path, lora, params, family)
    written = safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
    assert written.keys() == theirs.keys()
    for name, tensor in written.items():
        np.testing.assert_array_equal(tensor, theirs[name])
    ours_fields = json.loads((tmp_path / "adapter_config.json").read_text())
    assert ours_fields.pop("base_model_name_or_path") == family
    assert ours_fields == {name: fields[name] for name in ours_fields}
