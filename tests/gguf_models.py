"""Small models of every family, and GGUF files of them."""

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

import gguf
import jax
import numpy as np
from gguf import GGUFValueType

from lightning_jax.models.attention.attention import rope_frequencies
from lightning_jax.models.families.fields import Fields, K, Sizes, long_growth
from lightning_jax.models.families.table import FAMILIES
from lightning_jax.models.formats.load import LoadedModel
from lightning_jax.models.formats.param_names import flatten, named_params, unflatten
from lightning_jax.models.shape import (
    Attention,
    DecoderConfig,
    DecoderShape,
    Experts,
    LinearScaling,
    LongRope,
    Rope,
    RopeScaling,
)
from lightning_jax.models.transformer import init_params
from lightning_jax.testing.tiny import tiny_model

TINY = tiny_model()
SCALING = RopeScaling(8.0, 1.0, 4.0, 8192)
NUMBER, REAL, FLAG = GGUFValueType.UINT32, GGUFValueType.FLOAT32, GGUFValueType.BOOL
# Fields of Granite's models, in config.json, and in GGUF after the architecture.
FACTORS = {
    "attention_multiplier": ("attention.scale", 0.3),
    "residual_multiplier": ("residual_scale", 0.22),
    "embedding_multiplier": ("embedding_scale", 12.0),
    "logits_scaling": ("logit_scale", 1.5),
}
OWN: dict[str, Any] = {name: value for name, (_, value) in FACTORS.items()} | {
    "shared_intermediate_size": 20,
    "num_local_experts": 0,
    "layer_types": ["attention", "attention"],
    "position_embedding_type": "rope",
}
TEXT, ARRAY, SIGNED = GGUFValueType.STRING, GGUFValueType.ARRAY, GGUFValueType.INT32


@dataclasses.dataclass(frozen=True)
class SmallFields(Fields):
    """Fields of a small model of any family, with its defaults for what only it has."""

    family: str

    @property
    def where(self) -> object:
        return "a small model"

    def with_defaults(self, **values: Any) -> Fields:
        return self

    def sizes(self, *, head_dim: int | None = None) -> Sizes:
        is_tied = self.family != "qwen3"
        num_layers = {"smollm3": 4, "gemma3_text": 7}.get(self.family, 2)  # a period, or more
        embed_dim = 24 if self.family == "phi3" else 16  # whose heads are all of it
        return Sizes(self.family, 259, embed_dim, 24, num_layers, 4, 2, 6, 1e-5, is_tied, 2048)

    def rope(self, head_dim: int, theta: float = 10000.0) -> Rope:
        return Rope(500000.0, SCALING if self.family == "llama" else None)

    def window_ropes(self, head_dim: int, theta: float, window_theta: float) -> tuple[Rope, Rope]:
        return Rope(theta, LinearScaling(8.0)), Rope(window_theta)

    def long_rope(self, head_dim: int) -> Rope:
        growth = long_growth(2048, 8192)
        return Rope(1000.0, LongRope((1.5, 2.5), (3.0, 9.0), 2048, 8192, growth), 4)

    def value(
        self, config: str | None, gguf: str | None, kind: type[K], default: K | None = None
    ) -> K:
        value = OWN.get(config or "", default) if self.family.startswith("granite") else default
        assert isinstance(value, kind)
        return value

    def size(self, config: str, gguf: str, most: int) -> int:
        sizes = {"expert_count": 5, "expert_used_count": 2, "attention.sliding_window": 5}
        return sizes.get(gguf, 12)

    def has(self, config: str) -> bool:
        return False

    is_gguf: ClassVar[bool] = True

    def require(self, **values: Any) -> None:
        pass


def variant(family: str) -> LoadedModel:
    """Return a model with all that its family has, whose weights are all random."""
    config = DecoderConfig(FAMILIES[family].read(SmallFields(family)))
    params = init_params(config, jax.random.key(1))
    noisy = {path: leaf + 0.125 for path, leaf in flatten(params).items()}
    return dataclasses.replace(TINY, config=config, params=unflatten(noisy))


def assert_equal(loaded: LoadedModel, saved: LoadedModel) -> None:
    assert loaded.config == saved.config
    ours, theirs = flatten(loaded.params), flatten(saved.params)
    assert ours.keys() == theirs.keys()
    for path, leaf in ours.items():
        np.testing.assert_array_equal(leaf, theirs[path])


def _permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder a Llama query or key weight like the GGUF converter: rows 0 1 2 3 to 0 2 1 3."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def _tensors(model: LoadedModel) -> dict[str, np.ndarray]:
    shape, flat = model.config.shape, flatten(model.params)
    mixer, parts = shape.blocks[0].mixer, {}
    for param in named_params(shape):
        rows = param.rows(np.asarray(flat[param.path]))
        if param.from_gguf is not None and "norm" in param.path[-2]:
            rows = rows + 1
        elif param.from_gguf is not None:
            rows = _permute(rows, mixer.heads if param.path[1] == "q" else mixer.kv_heads)
        parts.setdefault(param.gguf.name, {})[param.gguf.start] = np.ascontiguousarray(rows)
    return {
        name: np.concatenate([rows[start] for start in sorted(rows)])
        for name, rows in parts.items()
    }


def _own_values(family: str, shape: DecoderShape) -> dict[str, tuple[Any, Any]]:
    """Return the fields that only models of some families have."""
    mixer, mlp, values = whole_mixer(shape), shape.blocks[0].mlp, {}
    if family == "granite":
        values |= {f"{family}.{name}": (value, REAL) for name, value in FACTORS.values()}
    if mixer.rope is not None and isinstance(scaling := mixer.rope.scaling, LongRope):
        values |= {
            f"{family}.context_length": (scaling.max_positions, NUMBER),
            f"{family}.rope.dimension_count": (mixer.rope.size, NUMBER),
            f"{family}.rope.scaling.original_context_length": (shape.max_positions, NUMBER),
            f"{family}.rope.scaling.attn_factor": (scaling.attention_factor, REAL),
        }
    if mixer.rope is not None and isinstance(scaling := mixer.rope.scaling, LinearScaling):
        values |= {
            f"{family}.rope.scaling.type": ("linear", TEXT),
            f"{family}.rope.scaling.factor": (scaling.factor, REAL),
        }
    if (window := shape.blocks[0].mixer.window) is not None:
        values |= {f"{family}.attention.sliding_window": (window, NUMBER)}
    if isinstance(mlp, Experts):
        values |= {
            f"{family}.expert_count": (mlp.number, NUMBER),
            f"{family}.expert_used_count": (mlp.chosen, NUMBER),
            f"{family}.expert_feed_forward_length": (mlp.size, NUMBER),
        }
    return values


def whole_mixer(shape: DecoderShape) -> Attention:
    """Return the mixer of the first layer that sees all tokens."""
    return next(block.mixer for block in shape.blocks if block.mixer.window is None)


def write_gguf(
    path: Path,
    model: LoadedModel,
    fields: Mapping[str, tuple[Any, ...]] = {},
    *,
    tensors: Mapping[str, np.ndarray] = {},
    kept: Collection[str] | None = None,
    is_quantized: bool = False,
    architecture: str | None = None,
) -> None:
    """Write a GGUF file of the model, or of the tensors `kept`.

    `fields` has more fields, or other values for them: (value, type, type of an array's items).
    `tensors` are written too. `is_quantized` rounds the embedding to 8 bits. `architecture` is
    another name than the model's.
    """
    shape = model.config.shape
    family = architecture or FAMILIES[shape.family].gguf or shape.family
    mixer, mlp = whole_mixer(shape), shape.blocks[0].mlp
    assert mixer.rope is not None
    vocabulary = model.tokenizer.vocabulary
    values: dict[str, tuple[Any, ...]] = {
        f"{family}.embedding_length": (shape.embed_dim, NUMBER),
        f"{family}.feed_forward_length": (mlp.size, NUMBER),
        f"{family}.block_count": (shape.num_layers, NUMBER),
        f"{family}.attention.head_count": (mixer.heads, NUMBER),
        f"{family}.attention.head_count_kv": (mixer.kv_heads, NUMBER),
        f"{family}.attention.key_length": (mixer.head_dim, NUMBER),
        f"{family}.context_length": (shape.max_positions, NUMBER),
        f"{family}.attention.layer_norm_rms_epsilon": (shape.norm.eps, REAL),
        f"{family}.rope.freq_base": (mixer.rope.theta, REAL),
        "tokenizer.ggml.model": ("gpt2", TEXT),
        "tokenizer.ggml.pre": ("gpt-2", TEXT),
        "tokenizer.ggml.tokens": (sorted(vocabulary, key=vocabulary.__getitem__), ARRAY, TEXT),
        "tokenizer.ggml.token_type": ([1] * 256 + [3] * 3, ARRAY, SIGNED),
        "tokenizer.ggml.eos_token_id": (258, NUMBER),
        "tokenizer.chat_template": (model.tokenizer.template, TEXT),
    }
    values |= _own_values(family, shape)
    writer = gguf.GGUFWriter(path, family)
    for name, value in (values | dict(fields)).items():
        writer.add_key_value(name, *value)
    for name, rows in _tensors(model).items():
        if is_quantized and name == "token_embd.weight":
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(rows, kind), raw_dtype=kind)
        elif kept is None or name in kept:
            writer.add_tensor(name, rows)
    more, scaling = dict(tensors), mixer.rope.scaling
    if isinstance(scaling, LongRope):
        more["rope_factors_short.weight"] = np.asarray(scaling.short_factors, np.float32)
        more["rope_factors_long.weight"] = np.asarray(scaling.long_factors, np.float32)
    elif isinstance(scaling, RopeScaling):
        usual = rope_frequencies(mixer.head_dim, mixer.rope.theta, None)
        stretched = rope_frequencies(mixer.head_dim, mixer.rope.theta, scaling)
        more["rope_freqs.weight"] = np.asarray(usual / stretched)
    for name, rows in more.items():
        writer.add_tensor(name, rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
