"""Conversion of a GGUF file's metadata and quantised weights to our shape and float parameters."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import numpy as np
from gguf import ReaderTensor
from gguf.quants import dequantize

from lightning_jax.models.attention.attention import rope_frequencies
from lightning_jax.models.families.fields import (
    Fields,
    K,
    Sizes,
    checked_long,
    checked_size,
    checked_sizes,
    long_growth,
    require_positive,
)
from lightning_jax.models.families.table import FAMILIES, find_family, refuse_experts
from lightning_jax.models.formats.gguf_file import WHERE, Contents, lacks
from lightning_jax.models.formats.param_names import (
    NamedParam,
    Put,
    keep,
    named_params,
    refuse_extra,
    unflatten,
)
from lightning_jax.models.model_files import ModelError, unusable
from lightning_jax.models.shape import DecoderShape, LinearScaling, Rope, RopeScaling
from lightning_jax.models.transformer import Params
from lightning_jax.system.text import in_one_line

_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"
_FIELDS = {  # our name of a field -> its name in the file, after that of the architecture
    "embed_dim": "embedding_length",
    "mlp_dim": "feed_forward_length",
    "num_layers": "block_count",
    "num_heads": "attention.head_count",
    "num_kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "max_positions": "context_length",
}
_COMPUTED = ("blk.", "token_embd.", "output.", "output_norm.")  # beginnings of names
GROUP_BYTES = 2**18
COMPARED_ROWS = 64  # of the embedding and the output weights
# Norm of the difference by the norm of the rows. Types of 4 bits and more round by less.
MAX_ROUNDING = 0.15


def read_shape(file: Contents) -> DecoderShape:
    """Read the model's shape. Raises ModelError for one that this decoder cannot compute."""
    name = file.needed("general.architecture", str)
    _refuse_other_kinds(file, name)
    ours = next((one.name for one in FAMILIES.values() if one.gguf == name), name)
    family = find_family(ours, WHERE, "general.architecture")
    return family.read(GgufFields(name, file, family.name))


@dataclass(frozen=True)
class GgufFields(Fields):
    """Fields of a GGUF file, some of which its tensors tell."""

    prefix: str  # of the fields' names
    file: Contents
    family: str

    @property
    def where(self) -> object:
        """Return the file. See `Fields`."""
        return WHERE

    def sizes(self, *, head_dim: int | None = None) -> Sizes:
        """Return the sizes. The file has that of a head if it is not embed / heads."""
        names, file, tensors = self._names, self.file, self._tensors
        embedding = tensors.get(_EMBEDDING)
        if embedding is None or len(embedding.shape) != 2 or not all(embedding.shape):
            raise lacks(_EMBEDDING)
        embed_dim, heads = (file.needed(names[field], int) for field in ("embed_dim", "num_heads"))
        eps = file.needed(names["norm_eps"], float, 1e-5)
        eps = require_positive(WHERE, names["norm_eps"], eps)
        return checked_sizes(
            WHERE,
            names,
            family=self.family,
            vocab_size=int(embedding.shape[1]),
            embed_dim=embed_dim,
            mlp_dim=file.needed(names["mlp_dim"], int),
            num_layers=file.needed(names["num_layers"], int),
            num_heads=heads,
            num_kv_heads=file.needed(names["num_kv_heads"], int, heads),
            head_dim=file.needed(names["head_dim"], int, embed_dim // heads if heads > 0 else None),
            norm_eps=_decimal(eps),
            tie_embeddings=_OUTPUT not in tensors or repeated_embedding(tensors) is not None,
            max_positions=file.needed(names["max_positions"], int, 2048),
        )

    def with_defaults(self, **values: Any) -> "GgufFields":
        """Return the fields, which lack none. See `Fields`."""
        return self

    def rope(self, head_dim: int, theta: float = 10000.0) -> Rope:
        """Return the rotary positions. See `Fields`."""
        file, name = self.file, f"{self.prefix}.rope"
        theta = file.needed(self._names["rope_theta"], float, theta)
        theta = require_positive(WHERE, self._names["rope_theta"], theta)
        factors = self._tensors.get("rope_freqs.weight")
        factor = file.needed(f"{name}.scale_linear", float, 1.0)  # of older files
        if factors is not None:
            kind = "none" if factor == 1.0 else "linear"
            _refuse_other_scaling(kind, ("none",))
            return Rope(theta, _rope_scaling(factors, head_dim, theta))
        kind = file.needed(f"{name}.scaling.type", str, "linear")
        _refuse_other_scaling(kind, ("none", "linear"))
        factor = file.needed(f"{name}.scaling.factor", float, factor)
        if kind == "none" or factor in (0.0, 1.0):  # 0: not known
            return Rope(theta)
        factor = require_positive(WHERE, f"{name}.scaling.factor", factor)
        return Rope(theta, LinearScaling(_decimal(factor)))

    def window_ropes(self, head_dim: int, theta: float, window_theta: float) -> tuple[Rope, Rope]:
        """Return the two kinds of rotary positions. See `Fields`."""
        local = self.factor(None, "rope.freq_base_swa", window_theta)  # in few files
        return self.rope(head_dim, theta), Rope(local)

    def long_rope(self, head_dim: int) -> Rope:
        """Return rotary positions that may be LongRoPE's. See `Fields`."""
        name = f"{self.prefix}.rope.dimension_count"
        size = checked_size(WHERE, name, self.file.needed(name, int, head_dim), head_dim)
        rope = self.rope(head_dim)
        names = ("rope_factors_short.weight", "rope_factors_long.weight")
        tensors = {name: self._tensors[name] for name in names if name in self._tensors}
        if not tensors:
            return replace(rope, size=size)
        if missing := [name for name in names if name not in tensors]:
            raise lacks(missing[0])
        factors = {
            name: [_decimal(value) for value in _dequantize(tensor).reshape(-1).tolist()]
            for name, tensor in tensors.items()
        }
        prefix = f"{self.prefix}.rope.scaling"
        original = self.file.needed(f"{prefix}.original_context_length", int)
        lengths = original, self.file.needed(self._names["max_positions"], int)
        growth = self.file.value(f"{prefix}.attn_factor", float)
        scaling = checked_long(WHERE, size or head_dim, factors, lengths, growth)
        usual = long_growth(*lengths)  # the file has it as a float32
        if abs(scaling.attention_factor - usual) < 1e-6:
            scaling = replace(scaling, attention_factor=usual)
        return Rope(rope.theta, scaling, size)

    def value(
        self, config: str | None, gguf: str | None, kind: type[K], default: K | None = None
    ) -> K:
        """Return a field of the metadata. See `Fields`."""
        if gguf is None and default is not None:
            return default
        value = self.file.needed(f"{self.prefix}.{gguf}", kind, default)
        return _decimal(value) if isinstance(value, float) else value  # type: ignore[return-value]

    def has(self, config: str) -> bool:
        """Return False. See `Fields`."""
        return False

    is_gguf: ClassVar[bool] = True

    def require(self, **values: Any) -> None:
        """Accept the file, which has no such fields."""

    @property
    def _names(self) -> dict[str, str]:
        return {ours: f"{self.prefix}.{theirs}" for ours, theirs in _FIELDS.items()}

    @property
    def _tensors(self) -> dict[str, ReaderTensor]:
        return {tensor.name: tensor for tensor in self.file.tensors}


def _decimal(value: float) -> float:
    """Return the decimal from which a float32 was written: 9.99999974e-06 gives 1e-05."""
    return float(np.format_float_positional(np.float32(value), unique=True))


def repeated_embedding(tensors: Mapping[str, ReaderTensor]) -> tuple[str, str] | None:
    """Return the names (kept, dropped) of the embedding's two copies, or None if there is one.

    Some files of models with tied weights repeat the embedding as `output.weight`, in a type of
    another size. The copy with more bits is kept. No field of the file says that weights are tied,
    so rows of the two are compared.
    """
    names = (_EMBEDDING, _OUTPUT)
    if not all(name in tensors for name in names):
        return None
    one, other = (tensors[name] for name in names)
    if tuple(one.shape) != tuple(other.shape):
        return None
    rows = slice(None, None, len(one.data) // COMPARED_ROWS + 1)
    a, b = (_floats(tensor, tensor.data[rows]) for tensor in (one, other))
    with np.errstate(all="ignore"):  # of weights that are not finite
        if np.linalg.norm(a - b) > MAX_ROUNDING * np.linalg.norm(a):
            return None
    return names if one.n_bytes >= other.n_bytes else (names[1], names[0])


def _refuse_other_scaling(kind: str, supported: Sequence[str]) -> None:
    """Raise ModelError for a scaling of positions that this decoder does not implement."""
    if kind not in supported:
        raise ModelError.unsupported(
            "rope.scaling.type",
            f"the GGUF file scales positions by rope.scaling.type={in_one_line(kind, 80)}, which "
            "is not supported here; use a model without scaling, with linear scaling, or with "
            "Llama 3's rope_freqs.weight",
        )


def _refuse_other_kinds(file: Contents, name: str) -> None:
    """Raise ModelError for an adapter or another part of a model, and for experts."""
    kind = file.value("general.type", str, "model")
    if kind != "model":
        raise ModelError.unsupported(
            "general.type",
            f"the GGUF file has general.type={kind!r}, so it is not a model; use the file of the "
            "whole model",
        )
    experts = [key for key in (f"{name}.expert_count",) if file.value(key, int, 0)]
    experts += [tensor.name for tensor in file.tensors if "_exps." in tensor.name][:1]
    experts += ["general.architecture"] if name.endswith("moe") else []
    refuse_experts(WHERE, name, experts)


def read_params(file: Contents, shape: DecoderShape, dtype: Any, put: Put = keep) -> Params:
    """Read the weights, dequantised, each of which `put` gets as soon as it is read.

    Raises ModelError if one is missing or has the wrong shape.
    """
    tensors = {tensor.name: tensor for tensor in file.tensors}
    if shape.tie_embeddings and (copies := repeated_embedding(tensors)):
        tensors[_EMBEDDING] = tensors[copies[0]]
    params = named_params(shape)
    _check(tensors, params)

    def read(param: NamedParam) -> Any:
        rows = param.cut(param.gguf, _dequantize(tensors[param.gguf.name]))
        if param.from_gguf is not None:
            rows = param.from_gguf(rows)
        with jax.default_device(device):
            return put(param.path, param.from_rows(rows, dtype))

    device = jax.config.jax_default_device  # of this thread  # pyright: ignore
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NumPy releases the interpreter lock
        arrays = list(pool.map(read, params))
    return unflatten({param.path: array for param, array in zip(params, arrays, strict=True)})


def _check(tensors: Mapping[str, ReaderTensor], params: Sequence[NamedParam]) -> None:
    """Raise ModelError unless the file has these weights, and no others of layers.

    One row of each type is converted, to see that it can be.
    """
    types = set()
    for param in params:
        tensor = tensors.get(param.gguf.name)
        if tensor is None or not tensor.data.size:
            raise lacks(param.gguf.name)
        param.check(param.gguf, tuple(int(size) for size in tensor.shape[::-1]))
        if tensor.tensor_type not in types:
            types.add(tensor.tensor_type)
            _floats(tensor, np.atleast_2d(tensor.data)[:1])
    names = {param.gguf.name for param in params} | {_OUTPUT}
    others = {name for name in tensors if name not in names and name.startswith(_COMPUTED)}
    rotary = {name for name in others if ".rope_" in name or ".attn_rot_" in name}
    refuse_extra(WHERE, others - rotary, "use another file of the model, or another model")


def _dequantize(tensor: ReaderTensor) -> np.ndarray:
    """Return the weights in float32.

    Rows are given to the library in large groups. It converts 16 rows at a time, which leaves most
    of the time to Python.
    """
    rows = np.atleast_2d(tensor.data)
    if not rows.size:
        raise lacks(tensor.name)
    rows = rows.reshape(-1, rows.shape[-1])
    size = max(1, GROUP_BYTES // rows.shape[1])
    groups = [rows[first : first + size] for first in range(0, len(rows), size)]
    parts = [_floats(tensor, group.reshape(1, -1)) for group in groups]
    return np.concatenate(parts, axis=1).reshape(tensor.shape[::-1]).astype(np.float32, copy=False)


def _floats(tensor: ReaderTensor, rows: np.ndarray) -> np.ndarray:
    """Return some rows of a tensor in float32. Raise ModelError for a type that is not known."""
    try:
        with np.errstate(all="ignore"):  # of weights that are not finite
            return dequantize(rows, tensor.tensor_type)
    except (NotImplementedError, ValueError) as error:
        raise ModelError.unsupported(
            tensor.name,
            f"weight {tensor.name} of the GGUF file has type {tensor.tensor_type.name}, which "
            "cannot be converted; use another file of the model",
        ) from error


def _rope_scaling(tensor: ReaderTensor, head_dim: int, theta: float) -> RopeScaling:
    """Return the settings behind these factors. Raises ModelError if they are not Llama 3's.

    GGUF stores only the results of Llama 3's formula, but every release used the same settings.
    """
    factors = _dequantize(tensor).reshape(-1)
    if len(factors) != head_dim // 2 or not np.isfinite(factors).all() or np.min(factors) <= 0:
        raise unusable(WHERE, tensor.name, factors[:4], f"{head_dim // 2} factors above 0")
    scaling = RopeScaling(float(np.max(factors)), 1.0, 4.0, 8192)
    ours = rope_frequencies(head_dim, theta, None) / rope_frequencies(head_dim, theta, scaling)
    if not np.allclose(ours, factors, rtol=1e-3):
        raise ModelError.unsupported(
            "rope_freqs.weight",
            f"the GGUF file scales rotary frequencies by {np.unique(factors)[:4]}..., not by "
            "Llama 3's factors; load the Hugging Face directory of this model instead",
        )
    return scaling
