"""Export of adapters as a directory that Hugging Face's `peft` loads on top of their model."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors.numpy

from lightning_jax.models.config import LoraConfig
from lightning_jax.models.formats.huggingface import write_json
from lightning_jax.models.formats.param_names import flatten, hf_module
from lightning_jax.models.lora import trained_part
from lightning_jax.models.transformer import Params

_LEAVES = {"lora_a": "lora_A", "lora_b": "lora_B"}


def write(directory: Path, lora: LoraConfig, params: Params, base: str) -> None:
    """Write adapter_config.json and adapter_model.safetensors for the adapters in `params`.

    `base` is the name of the base model, as in `model.name`.
    """
    adapters = flatten(trained_part(params))
    arrays = {_name(*path): _rows(leaf) for path, leaf in adapters.items()}
    safetensors.numpy.save_file(arrays, directory / "adapter_model.safetensors", {"format": "pt"})
    layer = next(iter(adapters))[0]
    modules = [hf_module(layer, target).rpartition(".")[2] for target in lora.targets]
    write_json(
        directory / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "lora_dropout": 0.0,
            "target_modules": sorted(modules),
            "bias": "none",
            "fan_in_fan_out": False,
            "use_rslora": False,
            "use_dora": False,
            "modules_to_save": None,
            "init_lora_weights": True,
            "inference_mode": True,
        },
    )


def _name(layer: str, part: str, leaf: str) -> str:
    return f"base_model.model.{hf_module(layer, part)}.{_LEAVES[leaf]}.weight"


def _rows(leaf: Any) -> np.ndarray:
    """Return the leaf in float32 as [out, in], the order in files."""
    return np.ascontiguousarray(np.asarray(jax.device_get(leaf)).astype(np.float32).T)
