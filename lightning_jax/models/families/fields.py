"""Fields of a model's file, config.json or GGUF metadata, and checks of their values."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from lightning_jax.errors import InvalidValue
from lightning_jax.models.model_files import ModelError, unusable
from lightning_jax.models.shape import (
    Attention,
    Block,
    DecoderShape,
    LongRope,
    Norm,
    Rope,
    RopeScaling,
)

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

    @property
    @abstractmethod
    def where(self) -> object:
        """Return the file, as errors name it."""

    @abstractmethod
    def with_defaults(self, **values: Any) -> "Fields":
        """Return fields that have these values where a config.json lacks them. GGUF has them."""

    @abstractmethod
    def sizes(self, *, head_dim: int | None = None) -> Sizes:
        """Return the sizes. `head_dim` is that of a file without one, by default embed / heads."""

    @abstractmethod
    def rope(self, head_dim: int, theta: float = 10000.0) -> Rope:
        """Return the rotary positions that layers share. `theta` is that of a file without one."""

    @abstractmethod
    def window_ropes(self, head_dim: int, theta: float, window_theta: float) -> tuple[Rope, Rope]:
        """Return the rotary positions of layers that see all tokens, and of those with a window.

        The thetas are those of a file without them.
        """

    @abstractmethod
    def long_rope(self, head_dim: int) -> Rope:
        """Return rotary positions that may be LongRoPE's, and those of a part of each head."""

    @abstractmethod
    def value(
        self, config: str | None, gguf: str | None, kind: type[K], default: K | None = None
    ) -> K:
        """Return a field by its name in config.json, or in GGUF after the architecture's.

        A name is None if no file of that kind has the field. Without a default the file must have
        it.
        """

    def factor(self, config: str | None, gguf: str | None, default: float | None = None) -> float:
        """Return a field that is a finite number above 0. See `value`."""
        name = gguf if self.is_gguf else config
        return require_positive(self.where, name or "", self.value(config, gguf, float, default))

    @abstractmethod
    def has(self, config: str) -> bool:
        """Return whether a config.json has this field. GGUF has none of them."""

    def size(self, config: str, gguf: str, most: int) -> int:
        """Return a field that is a number from 1 to `most`."""
        value = self.value(config, gguf, int)
        if not 1 <= value <= most:
            name = gguf if self.is_gguf else config
            raise unusable(self.where, name, value, f"an integer from 1 to {most}")
        return value

    @abstractmethod
    def require(self, **values: Any) -> None:
        """Refuse a config.json with other values of these fields, except null.

        GGUF has no such fields.
        """


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


def checked_size(where: object, name: str, size: int, head_dim: int) -> int | None:
    """Return how many elements of a head are rotated, or None if all are."""
    if size % 2 or not 0 < size <= head_dim:
        raise unusable(where, name, size, f"an even number of a head's {head_dim} elements")
    return None if size == head_dim else size


def checked_long(
    where: object, size: int, factors: Mapping[str, Any], lengths: tuple[Any, Any], growth: Any
) -> LongRope:
    """Return the LongRope of these fields. Raise ModelError for a value that cannot be.

    `factors` has the short factors and then the long ones, by their names. `lengths` are those of
    the model in pretraining, and afterwards.
    """
    rows = []
    for name, values in factors.items():
        if not isinstance(values, list) or len(values) != size // 2:
            raise unusable(where, name, values, f"{size // 2} factors")
        rows.append(tuple(require_positive(where, name, value) for value in values))
    names = ("original_max_position_embeddings", "max_position_embeddings")
    for name, value in zip(names, lengths, strict=True):
        if type(value) is not int or not 2 <= value <= MAX_SIZE:
            raise unusable(where, name, value, f"an integer from 2 to {MAX_SIZE}")
    original, longest = lengths
    growth = long_growth(original, longest) if growth is None else growth
    growth = require_positive(where, "attention_factor", growth)
    return LongRope(rows[0], rows[1], original, longest, growth)


def long_growth(original: int, longest: int) -> float:
    """Return LongRoPE's usual factor of rotated queries and keys, for these two lengths."""
    times = longest / original
    return math.sqrt(1 + math.log(times) / math.log(original)) if times > 1 else 1.0
