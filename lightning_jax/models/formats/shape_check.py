"""Check of the numbers from which a model's shape is built."""

import math
from collections.abc import Mapping
from typing import Any

from lightning_jax.errors import InvalidValue
from lightning_jax.models.attention.attention import RopeScaling
from lightning_jax.models.formats.names import ModelError
from lightning_jax.models.transformer import DecoderConfig
from lightning_jax.system.text import in_one_line

MAX_SIZE = 2**31 - 1  # of one axis of an array
MAX_LAYERS = 1000  # published models have up to 126. Each layer is built before a weight is read.
_SIZES = (
    *("vocab_size", "embed_dim", "mlp_dim", "num_heads", "num_kv_heads", "head_dim"),
    "max_positions",
)
# Fields of config.json, in the order of RopeScaling's.
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_LIMITS = dict.fromkeys(_SIZES, MAX_SIZE) | {"num_layers": MAX_LAYERS}


def checked_config(where: object, names: Mapping[str, str], **fields: Any) -> DecoderConfig:
    """Build the config of a model from the fields of a file.

    `names` has the file's name for each of our fields. Raises ModelError for a value that no model
    can have.
    """
    for ours, value in fields.items():
        name = names.get(ours, ours)
        if ours in _LIMITS and not (type(value) is int and 1 <= value <= _LIMITS[ours]):
            raise impossible(where, name, value, f"an integer from 1 to {_LIMITS[ours]}")
    try:
        return DecoderConfig(**fields)
    except InvalidValue as error:
        raise ModelError(
            f"{where} does not describe a model: {error}; use another file of it",
            reason="malformed",
            key=names.get(str(error.key), error.key),
        ) from error


def require_positive(where: object, name: str, value: Any) -> float:
    """Return the value as a float. Raise ModelError unless it is a finite number above 0."""
    is_number = type(value) in (int, float) and abs(value) < MAX_SIZE
    if not is_number or not math.isfinite(value) or value <= 0:
        raise impossible(where, name, value, f"a number above 0 and below {MAX_SIZE}")
    return float(value)


def checked_scaling(where: object, fields: Mapping[str, Any]) -> RopeScaling:
    """Return the RopeScaling of these fields. Raise ModelError for a value that cannot be."""
    factor, low, high, positions = (
        require_positive(where, name, fields.get(name)) for name in SCALING
    )
    if high <= low:
        raise impossible(where, SCALING[2], high, f"a number above {SCALING[1]}")
    return RopeScaling(factor, low, high, int(positions))


def impossible(where: object, name: str, value: Any, expected: str) -> ModelError:
    """Return the error for a field of a file that has an unusable value."""
    return ModelError(
        f"{where} has {in_one_line(name)}={in_one_line(repr(value), 80)}; expected {expected}; "
        "copy the model's own file there",
        reason="malformed",
        key=name,
    )
