"""Fields of a model's file, config.json or GGUF metadata, and checks of their values."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from lightning_jax.errors import InvalidValue
from lightning_jax.models.model_files import ModelError, unusable
from lightning_jax.models.shape import Attention, Block, DecoderShape, Norm, Rope, RopeScaling

K = TypeVar("K")
MAX_SIZE = 2**31 - 1  # of one axis of an array
MAX_LAYERS = 1000  # published models have up to 126. Each layer is built before a weight is read.
# Fields of config.json, in the order of RopeScaling's.
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_MAX_SIZES = (
    *("vocab_size", "embed_dim", "mlp_dim", "num_heads", "num_kv_heads", "head_dim"),
    "max_positions",
)
_LIMITS = dict.fromkeys(_MAX_SIZES, MAX_SIZE) | {"num_layers": MAX_LAYERS}


@dataclass(frozen=True)
class Sizes:
    """Numbers that the files of every family have."""

    family: str
    vocab_size: int
    embed_dim: int
    mlp_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    tie_embeddings: bool
    max_positions: int

    def attention(self, rope: Rope | None, **changes: Any) -> Attention:
        """Return attention of these heads, with other fields changed."""
        return Attention(self.num_heads, self.num_kv_heads, self.head_dim, rope, **changes)

    def decoder(self, *pattern: Block, **changes: Any) -> DecoderShape:
        """Return the shape of a model whose layers repeat the pattern, with fields changed."""
        fields: dict[str, Any] = {
            "vocab_size": self.vocab_size,
            "embed_dim": self.embed_dim,
            "norm": Norm(self.norm_eps),
            "tie_embeddings": self.tie_embeddings,
            "max_positions": self.max_positions,
            "family": self.family,
        }
        blocks = tuple(pattern[i % len(pattern)] for i in range(self.num_layers))
        return DecoderShape(blocks=blocks, **fields | changes)


class Fields(ABC):
    """Fields of one file, of either kind. `read` of a family makes a shape of them.

    Every method raises ModelError for a value that no model can have, or that is not supported.
    """

    is_gguf: ClassVar[bool]

    @abstractmethod
    def sizes(self, *, head_dim: int | None = None) -> Sizes:
        """Return the sizes. `head_dim` is that of a file without one, by default embed / heads."""

    @abstractmethod
    def rope(self, head_dim: int) -> Rope:
        """Return the rotary positions that all layers of the file share."""

    @abstractmethod
    def value(self, config: str, gguf: str, kind: type[K], default: K | None = None) -> K:
        """Return a field by its name in config.json, or in GGUF after the architecture's.

        Without a default the file must have it.
        """

    @abstractmethod
    def has(self, config: str) -> bool:
        """Return whether a config.json has this field. GGUF has none of them."""

    def size(self, config: str, gguf: str, most: int) -> int:
        """Return a field that is a number from 1 to `most`."""
        value = self.value(config, gguf, int)
        if not 1 <= value <= most:
            place, name = ("the GGUF file", gguf) if self.is_gguf else ("config.json", config)
            raise unusable(place, name, value, f"an integer from 1 to {most}")
        return value

    @abstractmethod
    def require(self, **values: Any) -> None:
        """Refuse a config.json with other values of these fields. GGUF has no such fields."""


def checked_sizes(where: object, names: Mapping[str, str], **fields: Any) -> Sizes:
    """Return the sizes in a file.

    `names` has the file's name for each of our fields. Raises ModelError for a value that no model
    can have.
    """
    for ours, value in fields.items():
        name = names.get(ours, ours)
        if ours in _LIMITS and not (type(value) is int and 1 <= value <= _LIMITS[ours]):
            raise unusable(where, name, value, f"an integer from 1 to {_LIMITS[ours]}")
    sizes = Sizes(**fields)
    try:
        sizes.attention(None)
    except InvalidValue as error:
        raise ModelError.malformed(
            names.get(str(error.key), error.key),
            f"{where} does not describe a model: {error}; use another file of it",
        ) from error
    return sizes


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
