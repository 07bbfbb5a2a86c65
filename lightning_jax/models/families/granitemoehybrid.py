"""Granite 4, dense: its files can describe experts and Mamba layers too, which are refused.

In GGUF such a model is one of the architecture granite.
"""

from dataclasses import replace
from typing import Any

from lightning_jax.models.families import granite
from lightning_jax.models.families.dense import read_dense, without_rope
from lightning_jax.models.families.family import Family, Weight
from lightning_jax.models.families.fields import Fields
from lightning_jax.models.families.llama import WEIGHTS
from lightning_jax.models.model_files import ModelError
from lightning_jax.models.shape import Attention, Block, DecoderShape, Dense, Rope

_EXPERTS, _TYPES, _POSITIONS = "num_local_experts", "layer_types", "position_embedding_type"
_ATTENTION = ("attention", "full_attention")


def read(fields: Fields) -> DecoderShape:
    """Return the shape of a model whose layers are all attention and one MLP.

    A file without these fields has experts and Mamba layers, as in transformers.
    """
    fields.require(normalization_function="rmsnorm")
    shape = read_dense(fields)
    if number := fields.value(_EXPERTS, None, int, 8):
        raise _unlike(fields, _EXPERTS, f"{number} experts")
    types = fields.value(_TYPES, None, list, ["mamba"])
    if other := [kind for kind in types if kind not in _ATTENTION]:
        raise _unlike(fields, _TYPES, f"layers of the type {str(other[0])[:40]}")
    mlp = Dense(fields.value("shared_intermediate_size", "feed_forward_length", int))
    blocks = [replace(block, mlp=mlp) for block in shape.blocks]
    if fields.value(_POSITIONS, None, str, "nope") != "rope":
        blocks = map(without_rope, blocks)
    return granite.with_factors(fields, replace(shape, blocks=tuple(blocks)))


def _unlike(fields: Fields, key: str, parts: str) -> ModelError:
    return ModelError.unsupported(
        key,
        f"{fields.where} has {parts}, which Granite 4's dense models lack and which are not "
        "supported; use a dense one, such as granite-4.0-micro",
    )


def write(shape: DecoderShape) -> dict[str, Any]:
    """Return the fields of config.json."""
    block = shape.blocks[0]
    return granite.write(shape) | {
        "shared_intermediate_size": block.mlp.size,
        _EXPERTS: 0,
        "num_experts_per_tok": 0,
        _TYPES: ["attention"] * shape.num_layers,
        _POSITIONS: "nope" if block.mixer.rope is None else "rope",
        "mamba_n_heads": 1,  # of no layer, but transformers wants a divisor of the width
    }


_MICRO = Block(Attention(40, 8, 64, Rope(1e7), scale=0.015625), Dense(8192), residual_scale=0.22)
_LAYER = "model.layers.{layer}"
_FUSED = f"{_LAYER}.shared_mlp.input_linear"  # rows of the gate, then those of the other product
FAMILY = Family(
    name="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    read=read,
    write=write,
    weights=WEIGHTS
    | {
        "gate": Weight(_FUSED, "blk.{layer}.ffn_gate"),
        "up": Weight(_FUSED, "blk.{layer}.ffn_up"),
        "down": Weight(f"{_LAYER}.shared_mlp.output_linear", "blk.{layer}.ffn_down"),
    },
    tool_format="hermes",
    shapes={
        "ibm-granite/granite-4.0-micro": DecoderShape(
            vocab_size=100352,
            embed_dim=2560,
            blocks=40 * (_MICRO,),
            embed_scale=12.0,
            logit_divisor=10.0,
            max_positions=131072,
            family="granitemoehybrid",
        )
    },
)
