"""Low-rank adapters of a model's kernels (LoRA, Hu et al., arXiv 2106.09685).

A kernel W [in, out] with an adapter computes `x W + (alpha / rank) (x A) B`. A, `lora_a`
[in, rank], and B, `lora_b` [rank, out], are leaves next to the kernel in the parameter tree. With
adapters, only these leaves are trained. A is random and B zero at first, so the adapted model
starts equal to the base model. `write_peft` exports adapters as a directory that Hugging Face's
`peft` loads on top of their model, and `open_policy` reads them again.
"""

import logging
import zlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from lightning_jax.models.blocks.layer import adapted_kernels_of, kernels_of
from lightning_jax.models.config import LoraConfig, ModelConfig
from lightning_jax.models.formats.advice import ADAPTER
from lightning_jax.models.formats.huggingface import write_json
from lightning_jax.models.formats.load import LoadedModel, ModelReader, open_configured
from lightning_jax.models.formats.param_names import (
    ParamPath,
    Place,
    Put,
    flatten,
    named_params,
    unflatten,
)
from lightning_jax.models.model_files import (
    ADAPTERS,
    MERGED,
    ModelError,
    local_path,
    read_object,
)
from lightning_jax.models.shape import DecoderConfig
from lightning_jax.models.transformer import Params, init_params, layer_of, param_shapes
from lightning_jax.settings import ConfigError
from lightning_jax.system.text import in_one_line

log = logging.getLogger(__name__)

ADAPTER_LEAVES = ("lora_a", "lora_b")
_PEFT_LEAVES = {"lora_a": "lora_A", "lora_b": "lora_B"}
_PEFT_WEIGHTS = "adapter_model.safetensors"
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
            arrays[_peft_name(module, leaf)] = rows
        if len(adapters) > 1:
            ranks[name] = len(adapters)
    safetensors.numpy.save_file(arrays, directory / _PEFT_WEIGHTS, {"format": "pt"})
    write_json(
        directory / ADAPTER,
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
    places = _kernel_places(config)
    modules: dict[str, list[_Adapter]] = {}
    for layer, parts in trained_part(params).items():
        for part, leaves in parts.items():
            a, b = (np.asarray(jax.device_get(leaves[leaf])) for leaf in ADAPTER_LEAVES)
            place = places[layer, part]
            adapter = place, a.astype(np.float32).T, b.astype(np.float32).T
            modules.setdefault(_module(place), []).append(adapter)
    return modules


def _kernel_places(config: DecoderConfig) -> dict[ParamPath, Place]:
    """Return the rows of Hugging Face's tensors that are kernels, by (layer, part)."""
    kernels = (param for param in named_params(config.shape) if param.path[-1] == "kernel")
    return {param.path[:-1]: param.hf for param in kernels}


def _module(place: Place) -> str:
    return place.name.removesuffix(".weight")


def _peft_name(module: str, leaf: str) -> str:
    return f"base_model.model.{module}.{_PEFT_LEAVES[leaf]}.weight"


def _joined(adapters: list[_Adapter]) -> tuple[np.ndarray, np.ndarray]:
    """Return A and B of one module. Those of each kernel meet only in its own rows of B."""
    a = np.concatenate([rows for _, rows, _ in adapters])
    b = np.zeros((adapters[0][0].total, len(a)), np.float32)
    column = 0
    for place, rows, columns in adapters:
        b[place.start : place.stop, column : column + len(rows)] = columns
        column += len(rows)
    return np.ascontiguousarray(a), b


def read_peft(directory: Path, config: DecoderConfig) -> tuple[LoraConfig, Params]:
    """Read adapters that `write_peft` wrote for a model of this shape, in float32.

    Raises ModelError if a file is damaged or is for another model.
    """
    saved = read_object(directory / ADAPTER)
    try:
        rank, alpha = int(saved["r"]), float(saved["lora_alpha"])
        arrays = safetensors.numpy.load_file(directory / _PEFT_WEIGHTS)
        parts = {
            path: _part_of(place, rank, *(arrays[_peft_name(module, x)] for x in ADAPTER_LEAVES))
            for path, place in _kernel_places(config).items()
            if _peft_name(module := _module(place), ADAPTER_LEAVES[0]) in arrays
        }
        targets = tuple(
            sorted({path[-1] for path, (_, _, is_adapted) in parts.items() if is_adapted})
        )
        leaves = {
            (*path, leaf): matrix
            for path, (a, b, _) in parts.items()
            for leaf, matrix in zip(ADAPTER_LEAVES, (a, b), strict=True)
            if path[-1] in targets
        }
        lora = LoraConfig(rank, alpha, targets)
        _check_shapes(adapted_shape(config, lora), leaves)
    except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise ModelError.malformed(
            str(directory),
            f"the adapters in {directory} cannot be read ({in_one_line(repr(error))}); expected "
            "those that the run exported. Delete the folder to use the merged weights.",
        ) from error
    return lora, unflatten(leaves)


def _part_of(
    place: Place, rank: int, a: np.ndarray, b: np.ndarray
) -> tuple[np.ndarray, np.ndarray, bool]:
    """Return (A, B, True if the kernel has an adapter) of one kernel of a module, as `_joined` put.

    Of a shared module a kernel may have none, and then no column of B is used in its rows.
    """
    rows = b[place.start : place.stop]
    columns = np.flatnonzero(rows.any(axis=0))
    start = int(columns[0]) // rank * rank if columns.size else 0
    ranks = slice(start, start + rank)
    is_alone = place.stop - place.start == place.total
    return (
        a[ranks].astype(np.float32).T,
        rows[:, ranks].astype(np.float32).T,
        is_alone or bool(columns.size),
    )


def _check_shapes(config: DecoderConfig, leaves: Mapping[ParamPath, np.ndarray]) -> None:
    """Raise ValueError unless these are the model's adapters."""
    expected = flatten(trained_part(param_shapes(config)))
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    if shapes != {path: leaf.shape for path, leaf in expected.items()}:
        raise ValueError("they are for a model of another shape")


def adapters_beside(name: str) -> Path | None:
    """Return the folder of the adapters that a model has merged if a run exported it with some."""
    if (path := local_path(name)) is None:
        return None
    policy = path.absolute()
    for parent, inner in ((policy, ""), (policy.parent, policy.name)):
        folder = parent.parent / ADAPTERS / inner
        if parent.name == MERGED and (folder / ADAPTER).is_file():
            return folder
    return None


def open_policy(settings: ModelConfig) -> ModelReader:
    """Open a model as `open_configured` does, and a run's exported policy as the run served it.

    With weights in bfloat16 that is with its adapters apart. Rounded after they are merged, a
    weight stays as it was unless its change is half of the grid spacing there. A short run changes
    many weights by less.
    """
    folder = adapters_beside(settings.name)
    if folder is None or settings.dtype == "float32":
        return open_configured(settings)
    whole = open_configured(replace(settings, dtype="float32"))
    lora, adapters = read_peft(folder, whole.config)
    flat = flatten(adapters)
    log.info("keeping the adapters of %s apart from its weights, as its run did", settings.name)

    def read(put: Put) -> Params:
        def put_base(path: ParamPath, leaf: jax.Array) -> jax.Array:
            a, b = (flat.get((*path[:-1], name)) for name in ADAPTER_LEAVES)
            if path[-1] == "kernel" and a is not None and b is not None:
                leaf = jnp.asarray(np.asarray(leaf) - lora.scale * (a @ b))
            return put(path, leaf.astype(settings.dtype))

        leaves = {path: put(path, jnp.asarray(leaf)) for path, leaf in flat.items()}
        return overlay(whole.params(put_base), unflatten(leaves))

    return replace(whole, config=adapted_shape(whole.config, lora), params=read)
