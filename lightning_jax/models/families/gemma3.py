"""Gemma 3, of text: five of six layers see a window of tokens and rotate faster than the sixth.

Norms come before and after, and their scales are stored less 1. Models of images too have such a
model as their text_config.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from lightning_jax.models.families.dense import QK_NORMS, WEIGHTS, write_dense
from lightning_jax.models.families.family import Family, Weight
from lightning_jax.models.families.fields import MAX_SIZE, Fields, Sizes
from lightning_jax.models.model_files import unusable
from lightning_jax.models.shape import (
    Attention,
    Block,
    DecoderShape,
    Dense,
    LinearScaling,
    Norm,
    Rope,
)

_WHOLE, _LOCAL = "full_attention", "sliding_attention"
_TYPES, _WINDOW, _SCALAR = "layer_types", "sliding_window", "query_pre_attn_scalar"
_THETA, _LOCAL_THETA = 1e6, 1e4
_PERIOD = 6  # layers, the last of which sees all tokens
# Published files leave out what transformers has as defaults.
_DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    _WINDOW: 4096,
}


def read(fields: Fields) -> DecoderShape:
    """Return the shape of a model."""
    fields = fields.with_defaults(**_DEFAULTS)
    fields.require(
        hidden_activation="gelu_pytorch_tanh",
        attention_bias=False,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        use_bidirectional_attention=False,
    )
    sizes = fields.sizes(head_dim=256)
    ropes = fields.window_ropes(sizes.head_dim, _THETA, _LOCAL_THETA)
    window = fields.size(_WINDOW, "attention.sliding_window", MAX_SIZE)
    scale = _scale(fields, sizes)
    by_type = {
        kind: _block(sizes.attention(rope, qk_norm="head", scale=scale, window=seen), sizes.mlp_dim)
        for kind, rope, seen in zip((_WHOLE, _LOCAL), ropes, (None, window), strict=True)
    }
    blocks = [by_type[kind] for kind in _layer_types(fields, sizes.num_layers)]
    return sizes.decoder(*blocks, **_around(sizes.embed_dim, sizes.norm_eps))


def _block(mixer: Attention, mlp_dim: int) -> Block:
    return Block(mixer, Dense(mlp_dim, "gelu_tanh"), norms="around")


def _around(embed_dim: int, eps: float = 1e-6) -> dict[str, Any]:
    """Return the fields of a shape, beside its blocks, that all of these models have."""
    return {"norm": Norm(eps, is_wide=True, offset=1.0), "embed_scale": embed_dim**0.5}


def _scale(fields: Fields, sizes: Sizes) -> float | None:
    """Return the factor of scores. In GGUF only the largest model has another than the usual one.

    It is known by its number of layers, as in llama.cpp.
    """
    is_largest = fields.is_gguf and sizes.num_layers == _27B_LAYERS
    usual = sizes.embed_dim / sizes.num_heads if is_largest else float(sizes.head_dim)
    scalar = fields.factor(_SCALAR, None, usual if fields.is_gguf else 256.0)
    return None if scalar == sizes.head_dim else scalar**-0.5


def _layer_types(fields: Fields, num_layers: int) -> list[str]:
    """Return the type of each layer, which older files give as a period."""
    name = "sliding_window_pattern"
    name = name if fields.has(name) else f"_{name}"
    period = fields.value(name, "attention.sliding_window_pattern", int, _PERIOD)
    if period < 1:
        raise unusable(fields.where, name, period, "a number of layers above 0")
    usual = [_LOCAL if (i + 1) % period else _WHOLE for i in range(num_layers)]
    types = fields.value(_TYPES, None, list, usual)
    if len(types) < num_layers or any(kind not in (_WHOLE, _LOCAL) for kind in types):
        raise unusable(fields.where, _TYPES, types, f"{num_layers} times {_WHOLE!r} or {_LOCAL!r}")
    return types[:num_layers]


def write(shape: DecoderShape) -> dict[str, Any]:
    """Return the fields of config.json."""
    block = shape.blocks[0]
    mixers = {other.mixer.window is None: other.mixer for other in shape.blocks}
    ropes = {is_whole: mixer.rope for is_whole, mixer in mixers.items()}
    plain = replace(block.mixer, rope=ropes.get(True, Rope(_THETA)), window=None)
    fields = write_dense(replace(shape, blocks=shape.num_layers * (replace(block, mixer=plain),)))
    del fields["hidden_act"]
    local = ropes.get(False) or Rope(_LOCAL_THETA)
    scalar = plain.head_dim if plain.scale is None else round(plain.scale**-2, 6)
    kinds = {True: _WHOLE, False: _LOCAL}
    return fields | {
        "hidden_activation": "gelu_pytorch_tanh",
        _SCALAR: int(scalar) if scalar == int(scalar) else scalar,
        _TYPES: [kinds[other.mixer.window is None] for other in shape.blocks],
        _WINDOW: mixers[False].window if False in mixers else _DEFAULTS[_WINDOW],
        "rope_local_base_freq": local.theta,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }


def _stored(scale: np.ndarray, block: Block | None) -> np.ndarray:
    """Return the scale of a norm, to which GGUF adds 1."""
    return scale - 1


_LAYER = "model.layers.{layer}"
_NORMS = QK_NORMS | {
    "final_norm": WEIGHTS["final_norm"],
    "attn_norm": WEIGHTS["attn_norm"],
    "attn_post_norm": Weight(
        f"{_LAYER}.post_attention_layernorm", "blk.{layer}.post_attention_norm"
    ),
    "mlp_norm": Weight(f"{_LAYER}.pre_feedforward_layernorm", "blk.{layer}.ffn_norm"),
    "mlp_post_norm": Weight(f"{_LAYER}.post_feedforward_layernorm", "blk.{layer}.post_ffw_norm"),
}


def _published(
    layers: int,
    embed_dim: int,
    mlp_dim: int,
    heads: int,
    kv_heads: int,
    window: int = 1024,
    *,
    scalar: int | None = None,
    is_small: bool = False,
) -> DecoderShape:
    """Return the shape of a published model. Small ones have no images and fewer positions."""
    head_dim = 256 if scalar is None else 128
    scale = None if scalar is None else scalar**-0.5
    mixer = Attention(
        heads, kv_heads, head_dim, Rope(_LOCAL_THETA), qk_norm="head", scale=scale, window=window
    )
    scaling = None if is_small else LinearScaling(8.0)
    whole = replace(mixer, rope=Rope(_THETA, scaling), window=None)
    period = (_PERIOD - 1) * (_block(mixer, mlp_dim),) + (_block(whole, mlp_dim),)
    return DecoderShape(
        vocab_size=262144 if is_small else 262208,
        embed_dim=embed_dim,
        blocks=(layers // _PERIOD * period) + period[: layers % _PERIOD],
        max_positions=32768 if is_small else 131072,
        family="gemma3_text",
        **_around(embed_dim),
    )


_27B_LAYERS = 62
FAMILY = Family(
    name="gemma3_text",
    gguf="gemma3",
    wrapper="gemma3",
    architecture="Gemma3ForCausalLM",
    read=read,
    write=write,
    weights=WEIGHTS | {name: replace(one, from_gguf=_stored) for name, one in _NORMS.items()},
    shapes={
        "google/gemma-3-270m-it": _published(18, 640, 2048, 4, 1, 512, is_small=True),
        "google/gemma-3-1b-it": _published(26, 1152, 6912, 4, 1, 512, is_small=True),
        "google/gemma-3-4b-it": _published(34, 2560, 10240, 8, 4),
        "google/gemma-3-12b-it": _published(48, 3840, 15360, 16, 8),
        "google/gemma-3-27b-it": _published(_27B_LAYERS, 5376, 21504, 32, 16, scalar=168),
    },
)
