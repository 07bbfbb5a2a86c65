"""Low-rank adapters of a model's kernels (LoRA, Hu et al., arXiv 2106.09685).

A kernel W [in, out] with an adapter computes `x W + (alpha / rank) (x A) B`. A, `lora_a`
[in, rank], and B, `lora_b` [rank, out], are leaves next to the kernel in the parameter tree. With
adapters, only these leaves are trained. A is random and B zero at first, so the adapted model
starts equal to the base model. `write_peft` exports adapters as a directory that Hugging Face's
`peft` loads on top of their model.
"""

import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from lightning_jax.models.blocks.layer import adapted_kernels_of, kernels_of
from lightning_jax.models.config import LoraConfig
from lightning_jax.models.formats.huggingface import write_json
from lightning_jax.models.formats.load import LoadedModel
from lightning_jax.models.formats.param_names import (
    ParamPath,
    Place,
    flatten,
    named_params,
    unflatten,
)
from lightning_jax.models.shape import DecoderConfig
from lightning_jax.models.transformer import Params, init_params, layer_of
from lightning_jax.settings import ConfigError

ADAPTER_LEAVES = ("lora_a", "lora_b")
_PEFT_LEAVES = {"lora_a": "lora_A", "lora_b": "lora_B"}
_Adapter = tuple[Place, np.ndarray, np.ndarray]  # A [rank, in], B [out, rank]


def adapted_shape(
    model: DecoderConfig, lora: LoraConfig, number: int | None = None
) -> DecoderConfig:
    """Return the model's config with these adapters, unchanged for rank 0.

    With `number` each kernel has that many adapters, and each row of a batch chooses one. Raises
    ConfigError for a target that is not a kernel of the model.
    """
    if not lora.rank:
        return model
    kernels = {name for block in model.shape.blocks for name in adapted_kernels_of(block)}
    if strange := [name for name in lora.targets if name not in kernels]:
        raise ConfigError.unsupported(
            "model.lora.targets",
            f"model.lora.targets has {strange[0]}, but {model.shape.family} models have no adapter "
            f"there; set model.lora.targets to some of {', '.join(sorted(kernels))}",
        )
    return model.with_execution(lora=lora, num_adapters=number)


def adapted(
    model: LoadedModel, lora: LoraConfig, seed: int = 0, number: int | None = None
) -> LoadedModel:
    """Return the model with fresh adapters in its weights' dtype, unchanged for rank 0."""
    config = adapted_shape(model.config, lora, number)
    if config.execution.lora is None:
        return model
    dtype = jax.tree.leaves(model.params)[0].dtype
    adapters = _fresh(config, jax.random.key(seed), dtype)
    return replace(model, config=config, params=overlay(model.params, adapters))


@partial(jax.jit, static_argnums=(0, 2))
def _fresh(config: DecoderConfig, key: Any, dtype: Any) -> Params:
    """Build only the adapters. The compiler removes the other weights of the random model."""
    return trained_part(init_params(config, key, dtype))


def trained_part(params: Params) -> Params:
    """Return the leaves that training changes: the adapters, or all leaves if there are none."""
    flat = flatten(params)
    adapters = {path: leaf for path, leaf in flat.items() if path[-1] in ADAPTER_LEAVES}
    return unflatten(adapters) if adapters else params


def frozen_part(params: Params) -> Params | None:
    """Return the leaves that training does not change, or None without adapters."""
    flat = flatten(params)
    base = {path: leaf for path, leaf in flat.items() if path[-1] not in ADAPTER_LEAVES}
    return unflatten(base) if len(base) < len(flat) else None


def overlay(params: Params | None, part: Params) -> Params:
    """Return `params` with the leaves of `part` added or replaced."""
    return part if params is None else unflatten(flatten(params) | flatten(part))


def pick(tree: Params, like: Params) -> Params:
    """Return the leaves of `tree` at the paths of `like`."""
    flat = flatten(tree)
    return unflatten({path: flat[path] for path in flatten(like)})


def one_of(model: LoadedModel, index: int) -> LoadedModel:
    """Return the model with one of its several adapters as the only one."""
    params = {
        path: leaf[index] if path[-1] in ADAPTER_LEAVES else leaf
        for path, leaf in flatten(model.params).items()
    }
    config = model.config.with_execution(num_adapters=None)
    return replace(model, config=config, params=unflatten(params))


def adapted_facts(model: LoadedModel) -> dict[str, float | str]:
    """Return facts that identify the adapters' base model beyond shapes, or {} without adapters.

    The checksum covers a few weights and does not depend on the dtype they are loaded in.
    """
    lora = model.config.execution.lora
    if lora is None:
        return {}
    first = kernels_of(model.config.shape.blocks[0])[0]
    kernel = layer_of(model.params, 0)[first]["kernel"].astype(jnp.bfloat16)
    checksum = zlib.crc32(np.asarray(jax.device_get(kernel)).tobytes())
    return {"model.lora.alpha": lora.alpha, "weights of checksum": checksum}


def merged(model: LoadedModel) -> LoadedModel:
    """Merge the adapters into float32 kernels W + (alpha / rank) A B, for the same policy."""
    lora = model.config.execution.lora
    if lora is None:
        return model
    is_single = model.config.execution.num_adapters is None
    assert is_single, "select one of several adapters first, with one_of"
    # On the host: a device that holds a share of the weights may be too small for all of them.
    flat: dict[ParamPath, Any] = {
        path: np.asarray(jax.device_get(leaf)).astype(np.float32)
        for path, leaf in flatten(model.params).items()
    }
    kernels = {path: leaf for path, leaf in flat.items() if path[-1] not in ADAPTER_LEAVES}
    for path in flat:
        if path[-1] == "lora_a":
            layer = path[:-1]
            change = lora.scale * (flat[path] @ flat[(*layer, "lora_b")])
            kernels[(*layer, "kernel")] = flat[(*layer, "kernel")] + change
    return replace(model, config=model.config.with_execution(lora=None), params=unflatten(kernels))


def write_peft(directory: Path, config: DecoderConfig, params: Params, base: str) -> None:
    """Write adapter_config.json and adapter_model.safetensors for the adapters in `params`.

    `base` is the name of the base model, as in `model.name`. Adapters of kernels that are one
    module there become one adapter, whose rank is the sum of theirs.
    """
    lora = config.execution.lora
    assert lora is not None, "the model has adapters"
    modules = _by_module(config, params)
    arrays, ranks = {}, {}
    for module, adapters in modules.items():
        joined, name = _joined(adapters), module.rpartition(".")[2]
        for leaf, rows in zip(ADAPTER_LEAVES, joined, strict=True):
            arrays[f"base_model.model.{module}.{_PEFT_LEAVES[leaf]}.weight"] = rows
        if len(adapters) > 1:
            ranks[name] = len(adapters)
    safetensors.numpy.save_file(arrays, directory / "adapter_model.safetensors", {"format": "pt"})
    write_json(
        directory / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "rank_pattern": {name: number * lora.rank for name, number in ranks.items()},
            "alpha_pattern": {name: number * lora.alpha for name, number in ranks.items()},
            "lora_dropout": 0.0,
            "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
            "bias": "none",
            "fan_in_fan_out": False,
            "use_rslora": False,
            "use_dora": False,
            "modules_to_save": None,
            "init_lora_weights": True,
            "inference_mode": True,
        },
    )


def _by_module(config: DecoderConfig, params: Params) -> dict[str, list[_Adapter]]:
    """Return the adapters of each module of Hugging Face's model, by its name."""
    kernels = (param for param in named_params(config.shape) if param.path[-1] == "kernel")
    places = {param.path[:-1]: param.hf for param in kernels}
    modules: dict[str, list[_Adapter]] = {}
    for layer, parts in trained_part(params).items():
        for part, leaves in parts.items():
            a, b = (np.asarray(jax.device_get(leaves[leaf])) for leaf in ADAPTER_LEAVES)
            place = places[layer, part]
            adapter = place, a.astype(np.float32).T, b.astype(np.float32).T
            modules.setdefault(place.name.removesuffix(".weight"), []).append(adapter)
    return modules


def _joined(adapters: list[_Adapter]) -> tuple[np.ndarray, np.ndarray]:
    """Return A and B of one module. Those of each kernel meet only in its own rows of B."""
    a = np.concatenate([rows for _, rows, _ in adapters])
    b = np.zeros((adapters[0][0].total, len(a)), np.float32)
    column = 0
    for place, rows, columns in adapters:
        b[place.start : place.stop, column : column + len(rows)] = columns
        column += len(rows)
    return np.ascontiguousarray(a), b
