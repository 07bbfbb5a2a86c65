"""Conversion between Hugging Face's config.json and safetensors and our shape and parameters."""

import dataclasses
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from lightning_jax.models.formats.advice import (
    BASE,
    EMBEDDING,
    HEAD,
    on_missing_weights,
    on_no_config,
)
from lightning_jax.models.formats.families import (
    FAMILIES,
    SCALING,
    Family,
    checked_scaling,
    checked_shape,
    find_family,
    refuse_experts,
    require_positive,
)
from lightning_jax.models.formats.param_names import flatten, named_params, unflatten
from lightning_jax.models.formats.weight_files import Weights, find_weights
from lightning_jax.models.model_files import ModelError, read_object, unusable
from lightning_jax.models.shape import DecoderShape, RopeScaling
from lightning_jax.models.transformer import Params
from lightning_jax.system.text import in_one_line

logger = logging.getLogger(__name__)

COMPARED_ROWS = 64  # of the embedding and the output weights
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_REQUIRED = {  # our name of a field -> its name in config.json
    "vocab_size": "vocab_size",
    "embed_dim": "hidden_size",
    "mlp_dim": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
_NAMES = _REQUIRED | {
    "num_kv_heads": "num_key_value_heads",
    "max_positions": "max_position_embeddings",
}


def read_shape(directory: Path) -> DecoderShape:
    """Read the model's shape. Raises ModelError if this decoder cannot compute it exactly."""
    path = directory / "config.json"
    if not path.is_file():
        raise ModelError.missing(
            str(path), f"{directory} has no config.json; {on_no_config(directory)}"
        )
    fields = read_object(path)
    refuse_experts(path, [name for name in _EXPERTS if fields.get(name)])
    family = find_family(fields.get("model_type"), path, "model_type")
    missing = [name for name in _REQUIRED.values() if name not in fields]
    if missing:
        raise ModelError.missing(
            missing[0],
            f"{path} lacks {missing}, which a {fields['model_type']} model needs; copy the "
            "config.json of the model there",
        )
    _refuse_variants(path, fields, family)
    heads, embed_dim = fields["num_attention_heads"], fields["hidden_size"]
    is_divisible = type(heads) is int and heads > 0 and type(embed_dim) is int
    head_dim = fields.get("head_dim") or family.head_dim
    theta, scaling = _read_rope(path, fields)
    return checked_shape(
        path,
        _NAMES,
        **{ours: fields[theirs] for ours, theirs in _REQUIRED.items()},
        num_kv_heads=fields.get("num_key_value_heads") or heads,
        head_dim=head_dim or (embed_dim // heads if is_divisible else None),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=require_positive(path, "rms_norm_eps", fields.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(fields.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        max_positions=fields.get("max_position_embeddings", 2048),
        family=fields["model_type"],
    )


def _refuse_variants(path: Path, fields: dict[str, Any], family: Family) -> None:
    expected = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    expected |= {"quantization_config": None, **family.required_fields}
    for name, value in expected.items():
        if fields.get(name, value) != value:
            raise ModelError.unsupported(
                name,
                f"{path} has {name}={in_one_line(str(fields[name]), 80)}; only {value!r} is "
                "supported. Use another model.",
            )


def _read_rope(path: Path, fields: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    # Newer files keep all fields in "rope_parameters". Older files keep theta at the top level.
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise unusable(path, "rope_parameters", rope, "an object")
    theta = require_positive(
        path, "rope_theta", rope.get("rope_theta", fields.get("rope_theta", 10000.0))
    )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ModelError.unsupported(
            "rope_type",
            f"{path} has rope_type={kind!r}; only 'default' and 'llama3' are supported. "
            "Use another model.",
        )
    return theta, checked_scaling(path, rope)


def read_params(directory: Path, shape: DecoderShape, dtype: Any) -> Params:
    """Read the weights of all safetensors files.

    Raises ModelError if a weight is missing or has the wrong shape.
    """
    weights = find_weights(directory)
    params = {param.hf: param for param in named_params(shape)}
    inside = {_name_in(weights, name): name for name in params}
    leaves = {}
    for name, array in weights.read(inside):
        param = params[inside[name]]
        leaves[param.path] = param.from_rows(name, array, dtype)
    missing = [param.hf for param in params.values() if param.path not in leaves]
    if missing:
        files = set(weights.files.values())
        raise ModelError.missing(
            missing[0],
            f"the *.safetensors files of {directory} lack {len(missing)} of {len(params)} weights, "
            f"among them {missing[0]}: {on_missing_weights(weights.files, missing, files)}",
        )
    return unflatten(leaves)


def _name_in(weights: Weights, name: str) -> str:
    """Return the name that a weight has in the files.

    A model without a head is saved without "model." before its names. Of tied weights, either may
    be the one that is saved.
    """
    if name == EMBEDDING and name not in weights.files and HEAD in weights.files:
        return HEAD
    bare = name.removeprefix(BASE)
    return bare if name not in weights.files and bare in weights.files else name


def untie(directory: Path, shape: DecoderShape) -> DecoderShape:
    """Return the shape with output weights of their own if the files have them.

    As in transformers, config.json does not count if it says that they are the embedding, but the
    files have both and they differ. Rows of the two are compared.
    """
    if not shape.tie_embeddings:
        return shape
    weights = find_weights(directory)
    if not {EMBEDDING, HEAD} <= weights.files.keys():
        return shape
    step = shape.vocab_size // COMPARED_ROWS + 1
    embedding, head = (weights.rows(name, step) for name in (EMBEDDING, HEAD))
    if np.array_equal(embedding, head):
        return shape
    logger.warning(
        "%s has tie_word_embeddings=true, but its %s is not its embedding; both are used, as in "
        "transformers",
        directory,
        HEAD,
    )
    return dataclasses.replace(shape, tie_embeddings=False)


def write_model(
    directory: Path, shape: DecoderShape, params: Params, eos_ids: frozenset[int]
) -> None:
    """Write config.json, generation_config.json and model.safetensors."""
    flat = flatten(params)
    arrays = {}
    for param in named_params(shape):
        array = np.asarray(jax.device_get(flat[param.path]))
        arrays[param.hf] = np.ascontiguousarray(array.T if param.transpose else array)
    safetensors.numpy.save_file(arrays, directory / "model.safetensors", {"format": "pt"})
    dtype = str(jnp.asarray(flat[("embed", "embedding")]).dtype)
    ends = sorted(eos_ids)
    eos = {"eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {}
    write_json(directory / "config.json", _config_fields(shape) | {"dtype": dtype} | eos)
    # The library makes the file readable only by its owner.
    shutil.copymode(directory / "config.json", directory / "model.safetensors")
    write_json(directory / "generation_config.json", eos)


def _config_fields(shape: DecoderShape) -> dict[str, Any]:
    family = FAMILIES[shape.family]
    fields = {
        "architectures": [family.architecture],
        "model_type": shape.family,
        **{theirs: getattr(shape, ours) for ours, theirs in _NAMES.items()},
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": shape.tie_embeddings,
        "rope_theta": shape.rope_theta,
        **family.required_fields,
    }
    if shape.rope_scaling is not None:
        scaling = zip(SCALING, dataclasses.astuple(shape.rope_scaling), strict=True)
        fields["rope_scaling"] = {"rope_type": "llama3", **dict(scaling)}
    return fields


def write_json(path: Path, fields: dict[str, Any]) -> None:
    """Write the fields as an indented JSON file."""
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
