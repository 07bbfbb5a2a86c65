"""Model families that the decoder computes, and the shapes that a model of them can have."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_jax.errors import InvalidValue
from lightning_jax.models.model_files import ModelError, unusable
from lightning_jax.models.shape import DecoderShape, RopeScaling
from lightning_jax.system.text import in_one_line

_NO_WINDOW = {"use_sliding_window": False}
MAX_SIZE = 2**31 - 1  # of one axis of an array
MAX_LAYERS = 1000  # published models have up to 126. Each layer is built before a weight is read.
_SIZES = (
    *("vocab_size", "embed_dim", "mlp_dim", "num_heads", "num_kv_heads", "head_dim"),
    "max_positions",
)
# Fields of config.json, in the order of RopeScaling's.
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_LIMITS = dict.fromkeys(_SIZES, MAX_SIZE) | {"num_layers": MAX_LAYERS}
_QWEN = {"vocab_size": 151936, "rope_theta": 1e6, "norm_eps": 1e-6}
_QWEN_2_5_1_5B = DecoderShape(
    **_QWEN,
    embed_dim=1536,
    mlp_dim=8960,
    num_layers=28,
    num_heads=12,
    num_kv_heads=2,
    head_dim=128,
    qkv_bias=True,
    max_positions=32768,
    family="qwen2",
)
_QWEN_3_8B = DecoderShape(
    **_QWEN,
    embed_dim=4096,
    mlp_dim=12288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    tie_embeddings=False,
    qk_norm=True,
    max_positions=40960,
    family="qwen3",
)
SHAPES = {
    "Qwen/Qwen2.5-1.5B-Instruct": _QWEN_2_5_1_5B,
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": _QWEN_2_5_1_5B,
    "Qwen/Qwen3-8B": _QWEN_3_8B,
}


@dataclass(frozen=True)
class Family:
    architecture: str  # name of the model's class in transformers
    head_dim: int | None = None  # if a file does not say; None: embed_dim / num_heads
    qkv_bias: bool = False
    qk_norm: bool = False
    # Fields of config.json with the only value that this decoder computes.
    required_fields: Mapping[str, Any] = field(default_factory=dict)


# By the name that files have: model_type in config.json, general.architecture in GGUF.
FAMILIES = {
    "llama": Family("LlamaForCausalLM"),  # SmolLM and SmolLM2 too
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, required_fields=_NO_WINDOW),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True, head_dim=128, required_fields=_NO_WINDOW),
}


def find_family(name: Any, where: object, key: str) -> Family:
    """Return the family of this name. Raises ModelError if there is none."""
    if not isinstance(name, str) or name not in FAMILIES:
        raise ModelError.unsupported(
            key,
            f"{where} has {key}={in_one_line(repr(name), 80)}; supported are "
            f"{sorted(FAMILIES)}. Use a model of one of these families.",
        )
    return FAMILIES[name]


def refuse_experts(where: object, keys: Collection[str]) -> None:
    """Raise ModelError if a file has these fields of a mixture of experts."""
    for key in keys:
        raise ModelError.unsupported(
            key,
            f"{where} is a mixture of experts ({key}), which is not supported; use a dense model "
            f"of one of the families {sorted(FAMILIES)}",
        )


def checked_shape(where: object, names: Mapping[str, str], **fields: Any) -> DecoderShape:
    """Build the shape of a model from the fields of a file.

    `names` has the file's name for each of our fields. Raises ModelError for a value that no model
    can have.
    """
    for ours, value in fields.items():
        name = names.get(ours, ours)
        if ours in _LIMITS and not (type(value) is int and 1 <= value <= _LIMITS[ours]):
            raise unusable(where, name, value, f"an integer from 1 to {_LIMITS[ours]}")
    try:
        return DecoderShape(**fields)
    except InvalidValue as error:
        raise ModelError.malformed(
            names.get(str(error.key), error.key),
            f"{where} does not describe a model: {error}; use another file of it",
        ) from error


def require_positive(where: object, name: str, value: Any) -> float:
    """Return the value as a float. Raise ModelError unless it is a finite number above 0."""
    is_number = type(value) in (int, float) and abs(value) < MAX_SIZE
    if not is_number or not math.isfinite(value) or value <= 0:
        raise unusable(where, name, value, f"a number above 0 and below {MAX_SIZE}")
    return float(value)


def checked_scaling(where: object, fields: Mapping[str, Any]) -> RopeScaling:
    """Return the RopeScaling of these fields. Raise ModelError for a value that cannot be."""
    factor, low, high, positions = (
        require_positive(where, name, fields.get(name)) for name in SCALING
    )
    if high <= low:
        raise unusable(where, SCALING[2], high, f"a number above {SCALING[1]}")
    return RopeScaling(factor, low, high, int(positions))
