"""Conversion between Hugging Face's config.json and safetensors and our shape and parameters."""

import dataclasses
import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from lightning_jax.models.families.fields import (
    Fields,
    K,
    Sizes,
    checked_long,
    checked_scaling,
    checked_size,
    checked_sizes,
    require_positive,
)
from lightning_jax.models.families.table import FAMILIES, find_family, refuse_experts
from lightning_jax.models.formats.advice import (
    BASE,
    EMBEDDING,
    HEAD,
    on_missing_weights,
    on_no_config,
)
from lightning_jax.models.formats.param_names import (
    NamedParam,
    ParamPath,
    Place,
    Put,
    flatten,
    keep,
    named_params,
    refuse_extra,
    unflatten,
)
from lightning_jax.models.formats.weight_files import Weights, find_weights
from lightning_jax.models.model_files import ModelError, read_object, unusable
from lightning_jax.models.shape import DecoderShape, LinearScaling, Rope
from lightning_jax.models.transformer import Params
from lightning_jax.system.text import in_one_line

logger = logging.getLogger(__name__)

_DTYPES = ("F64", "F32", "F16", "BF16")
# Beginnings of the names of what this decoder computes. Other parts, such as heads for rewards, are
# not read.
_COMPUTED = ("layers.", "embed_tokens.", "norm.", "lm_head.")
COMPARED_ROWS = 64  # of the embedding and the output weights
# Fields of rope_parameters for layers that see all tokens, and for those with a window.
_LAYER_KINDS = ("full_attention", "sliding_attention")
_OF_WHOLE = ("quantization_config", "tie_word_embeddings")  # not in text_config, or else of no use
# Beginnings of names in models of images too, after which names are those of a model of text.
_WRAPPED = ("model.language_model.", "language_model.model.", "language_model.")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_REQUIRED = {  # our name of a size -> its name in config.json
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
    fields = _text_fields(path, read_object(path))
    experts = [name for name in _EXPERTS if fields.get(name)]
    refuse_experts(path, fields.get("model_type"), experts)
    family = find_family(fields.get("model_type"), path, "model_type")
    file = ConfigFields(path, fields)
    file.require(quantization_config=None)
    return family.read(file)


def _text_fields(path: Path, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the model of text, which has a part of a model of images too."""
    kind = fields.get("model_type")
    family = next((one for one in FAMILIES.values() if one.wrapper and one.wrapper == kind), None)
    if family is None:
        return fields
    text = fields.get("text_config")
    if not isinstance(text, dict):
        raise unusable(path, "text_config", text, "an object")
    whole = {name: fields[name] for name in _OF_WHOLE if name in fields}
    return text | whole | {"model_type": family.name}


@dataclass(frozen=True)
class ConfigFields(Fields):
    """Fields of a config.json."""

    path: Path
    fields: dict[str, Any]

    def with_defaults(self, **values: Any) -> "ConfigFields":
        """Return fields with these values where the file lacks them. See `Fields`."""
        return dataclasses.replace(self, fields=values | self.fields)

    @property
    def where(self) -> object:
        """Return the file. See `Fields`."""
        return self.path

    def sizes(self, *, head_dim: int | None = None) -> Sizes:
        """Return the sizes. See `Fields`."""
        fields = self.fields
        if missing := [name for name in _REQUIRED.values() if name not in fields]:
            raise ModelError.missing(
                missing[0],
                f"{self.path} lacks {missing}, which a {fields['model_type']} model needs; copy "
                "the config.json of the model there",
            )
        heads, embed_dim = fields["num_attention_heads"], fields["hidden_size"]
        is_divisible = type(heads) is int and heads > 0 and type(embed_dim) is int
        head_dim = fields.get("head_dim") or head_dim
        return checked_sizes(
            self.path,
            _NAMES,
            family=fields["model_type"],
            **{ours: fields[theirs] for ours, theirs in _REQUIRED.items()},
            num_kv_heads=fields.get("num_key_value_heads") or heads,
            head_dim=head_dim or (embed_dim // heads if is_divisible else None),
            norm_eps=require_positive(self.path, "rms_norm_eps", fields.get("rms_norm_eps", 1e-6)),
            tie_embeddings=bool(fields.get("tie_word_embeddings", False)),
            max_positions=fields.get("max_position_embeddings", 2048),
        )

    def rope(self, head_dim: int, theta: float = 10000.0) -> Rope:
        """Return the rotary positions. See `Fields`."""
        return self._rope(self._rope_fields, self._theta(theta))

    def _rope(self, rope: Mapping[str, Any], theta: float) -> Rope:
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            return Rope(theta)
        if kind == "linear":
            factor = require_positive(self.path, "factor", rope.get("factor"))
            return Rope(theta, LinearScaling(factor))
        if kind != "llama3":
            raise ModelError.unsupported(
                "rope_type",
                f"{self.path} has rope_type={kind!r}; only 'default', 'linear' and 'llama3' are "
                "supported. Use another model.",
            )
        return Rope(theta, checked_scaling(self.path, rope))

    def window_ropes(self, head_dim: int, theta: float, window_theta: float) -> tuple[Rope, Rope]:
        """Return the two kinds of rotary positions. See `Fields`."""
        rope, name = self._rope_fields, "rope_local_base_freq"  # of older files
        if not rope.keys() & {*_LAYER_KINDS}:
            local = require_positive(self.path, name, self.fields.get(name, window_theta))
            return self.rope(head_dim, theta), Rope(local)
        ropes = []
        for kind, usual in zip(_LAYER_KINDS, (theta, window_theta), strict=True):
            part = rope.get(kind) or {}
            if not isinstance(part, dict):
                raise unusable(self.path, kind, part, "an object")
            base = require_positive(self.path, "rope_theta", part.get("rope_theta", usual))
            ropes.append(self._rope(part, base))
        return ropes[0], ropes[1]

    def long_rope(self, head_dim: int) -> Rope:
        """Return rotary positions that may be LongRoPE's. See `Fields`."""
        rope, fields = self._rope_fields, self.fields
        name = "partial_rotary_factor"
        share = require_positive(self.path, name, rope.get(name, fields.get(name, 1.0)))
        size = checked_size(self.path, name, int(head_dim * share), head_dim)
        if rope.get("rope_type", rope.get("type")) not in ("longrope", "su"):
            return dataclasses.replace(self.rope(head_dim), size=size)
        name = "original_max_position_embeddings"
        original = rope.get(name) or fields.get(name)
        lengths = original, fields.get("max_position_embeddings")
        factors = {name: rope.get(name) for name in ("short_factor", "long_factor")}
        growth = rope.get("attention_factor")
        scaling = checked_long(self.path, size or head_dim, factors, lengths, growth)
        return Rope(self._theta(10000.0), scaling, size)

    def _theta(self, default: float) -> float:
        theta = self._rope_fields.get("rope_theta", self.fields.get("rope_theta", default))
        return require_positive(self.path, "rope_theta", theta)

    @property
    def _rope_fields(self) -> dict[str, Any]:
        # Newer files keep all fields in "rope_parameters". Older files keep theta at the top level.
        rope = self.fields.get("rope_parameters") or self.fields.get("rope_scaling") or {}
        if not isinstance(rope, dict):
            raise unusable(self.path, "rope_parameters", rope, "an object")
        return rope

    def value(
        self, config: str | None, gguf: str | None, kind: type[K], default: K | None = None
    ) -> K:
        """Return a field of config.json. See `Fields`."""
        value = self.fields.get(config or "")
        value = default if value is None else value
        if value is None:
            raise ModelError.missing(
                str(config), f"{self.path} lacks {config}; copy the config.json of the model there"
            )
        is_number = kind is float and type(value) is int
        if type(value) is not kind and not is_number:
            raise unusable(self.path, str(config), value, f"a value of type {kind.__name__}")
        return kind(value) if is_number else value  # type: ignore[call-arg]

    def has(self, config: str) -> bool:
        """Return whether the file has the field. See `Fields`."""
        return self.fields.get(config) is not None

    is_gguf: ClassVar[bool] = False

    def require(self, **values: Any) -> None:
        """Refuse other values of these fields. See `Fields`."""
        for name, value in values.items():
            if self.fields.get(name) not in (None, value):
                raise ModelError.unsupported(
                    name,
                    f"{self.path} has {name}={in_one_line(str(self.fields[name]), 80)}; only "
                    f"{value!r} is supported. Use another model.",
                )


def read_params(directory: Path, shape: DecoderShape, dtype: Any, put: Put = keep) -> Params:
    """Read the weights of all safetensors files, each of which `put` gets as soon as it is whole.

    Raises ModelError if a weight is missing or has the wrong shape or type, or if the layers have
    others. All of this is checked before any is read.
    """
    weights = find_weights(directory)
    params = named_params(shape)
    by_file: dict[str, list[tuple[NamedParam, Place, int | None]]] = {}
    for param in params:
        for place, expert in _places_in(weights, param):
            by_file.setdefault(place.name, []).append((param, place, expert))
    _check(directory, weights, by_file)
    leaves: dict[ParamPath, jax.Array] = {}
    stacks: dict[ParamPath, np.ndarray] = {}  # that lack some experts
    missing = {param.path: param.shape[0] for param in params}
    for name, array in weights.read(by_file):
        for param, place, expert in by_file[name]:
            rows, path = param.cut(place, array, is_expert=expert is not None), param.path
            if expert is None:
                leaves[path] = put(path, param.from_rows(rows, dtype))
                continue
            if path not in stacks:
                stacks[path] = np.empty(param.shape, jnp.dtype(dtype))
            stacks[path][expert] = param.rows(rows)
            missing[path] -= 1
            if not missing[path]:
                leaves[path] = put(path, jnp.asarray(stacks.pop(path)))
    return unflatten(leaves)


def _places_in(weights: Weights, param: NamedParam) -> Iterator[tuple[Place, int | None]]:
    """Yield (the parameter's place in the files, index of an expert with a tensor or None)."""
    stacked = param.stacked
    if stacked is not None and (name := _name_in(weights, stacked.name)) in weights.heads:
        yield stacked._replace(name=name), None
        return
    for index, place in enumerate(param.hf_places):
        named = place._replace(name=_name_in(weights, place.name))
        yield named, index if param.is_split else None


def _check(
    directory: Path,
    weights: Weights,
    by_name: Mapping[str, Sequence[tuple[NamedParam, Place, int | None]]],
) -> None:
    """Raise ModelError unless the files have these weights, and no others of layers."""
    if missing := [name for name in by_name if name not in weights.heads]:
        files = set(weights.files.values())
        raise ModelError.missing(
            missing[0],
            f"the *.safetensors files of {directory} lack {len(missing)} of {len(by_name)} weights,"
            f" among them {missing[0]}: {on_missing_weights(weights.files, missing, files)}",
        )
    for name, parts in by_name.items():
        head = weights.heads[name]
        if head.dtype not in _DTYPES:
            raise ModelError.unsupported(
                name,
                f"weight {in_one_line(name)} of {directory} has type {in_one_line(head.dtype)}, "
                "which is not read; use the model's weights in bfloat16 or float32",
            )
        for param, place, expert in parts:
            param.check(place, head.shape, is_expert=expert is not None)
    others = [name for name in weights.heads if name not in by_name and _bare(name) != _bare(HEAD)]
    parts = {name for name in others if _bare(name).startswith(_COMPUTED)}
    extra = {name for name in parts if not name.endswith(".inv_freq")}  # rotary, of old files
    refuse_extra(directory, extra, "copy the config.json of these weights there")


def _name_in(weights: Weights, name: str) -> str:
    """Return the name that a weight has in the files.

    A model without a head is saved without "model." before its names. Of tied weights, either may
    be the one that is saved.
    """
    if name == EMBEDDING and name not in weights.files and HEAD in weights.files:
        return HEAD
    bare = name.removeprefix(BASE)
    names = (name, bare, *(f"{prefix}{bare}" for prefix in _WRAPPED))
    return next((one for one in names if one in weights.files), name)


def _bare(name: str) -> str:
    """Return a weight's name in files without what comes before it in a whole model."""
    prefix = next((prefix for prefix in (*_WRAPPED, BASE) if name.startswith(prefix)), "")
    return name.removeprefix(prefix)


def untie(directory: Path, shape: DecoderShape) -> DecoderShape:
    """Return the shape with output weights of their own if the files have them.

    As in transformers, config.json does not count if it says that they are the embedding, but the
    files have both and they differ. Rows of the two are compared.
    """
    if not shape.tie_embeddings:
        return shape
    weights = find_weights(directory)
    names = [_name_in(weights, name) for name in (EMBEDDING, HEAD)]
    if names[0] == names[1] or not {*names} <= weights.files.keys():
        return shape
    step = shape.vocab_size // COMPARED_ROWS + 1
    embedding, head = (weights.rows(name, step) for name in names)
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
    flat, family = flatten(params), FAMILIES[shape.family]
    arrays: dict[str, np.ndarray] = {}
    for param in sorted(named_params(shape), key=lambda param: param.hf.start):
        rows = param.rows(np.asarray(jax.device_get(flat[param.path])))
        parts = rows if param.is_split else [rows]
        for (name, start, *_), part in zip(param.hf_places, parts, strict=True):
            arrays[name] = np.concatenate((arrays[name], part)) if start else part
    safetensors.numpy.save_file(arrays, directory / "model.safetensors", {"format": "pt"})
    dtype = str(jnp.asarray(flat[("embed", "embedding")]).dtype)
    ends = sorted(eos_ids)
    eos = {"eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {}
    fields = {"architectures": [family.architecture], "model_type": family.name}
    # Without the field, transformers takes an id that a small vocabulary may not have.
    fields |= family.write(shape) | {"dtype": dtype, "pad_token_id": None} | eos
    write_json(directory / "config.json", fields)
    # The library makes the file readable only by its owner.
    shutil.copymode(directory / "config.json", directory / "model.safetensors")
    write_json(directory / "generation_config.json", eos)


def write_json(path: Path, fields: dict[str, Any]) -> None:
    """Write the fields as an indented JSON file."""
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
