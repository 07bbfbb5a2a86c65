"""Phi-3, Phi-3.5 and Phi-4: products in one tensor, long contexts by LongRoPE, and windows."""

from dataclasses import replace
from typing import Any

from lightning_jax.models.families.dense import WEIGHTS, write_dense
from lightning_jax.models.families.family import Family, Weight
from lightning_jax.models.families.fields import Fields, long_growth
from lightning_jax.models.shape import Attention, Block, DecoderShape, Dense, LongRope, Rope


def read(fields: Fields) -> DecoderShape:
    """Return the shape of a model, for the lengths up to which the short factors are its own."""
    sizes = fields.sizes()
    fields.require(hidden_act="silu", attention_bias=False, mlp_bias=False)
    rope = fields.long_rope(sizes.head_dim)
    length = sizes.max_positions
    if isinstance(rope.scaling, LongRope):
        length = min(length, rope.scaling.original_max_positions)
    window = fields.value("sliding_window", "attention.sliding_window", int, 0)
    mixer = sizes.attention(rope, window=window if 0 < window < length else None)
    block = Block(mixer, Dense(sizes.mlp_dim))
    return sizes.decoder(block, max_positions=length)


def write(shape: DecoderShape) -> dict[str, Any]:
    """Return the fields of config.json."""
    mixer = shape.blocks[0].mixer
    rope = mixer.rope
    assert rope is not None
    plain = replace(mixer, rope=replace(rope, scaling=None))
    blocks = tuple(replace(block, mixer=plain) for block in shape.blocks)
    fields = write_dense(replace(shape, blocks=blocks)) | {
        "sliding_window": mixer.window,
        "partial_rotary_factor": (rope.size or mixer.head_dim) / mixer.head_dim,
        "original_max_position_embeddings": shape.max_positions,
    }
    scaling = rope.scaling
    if not isinstance(scaling, LongRope):
        return fields
    original, longest = scaling.original_max_positions, scaling.max_positions
    fields["max_position_embeddings"] = longest
    fields["original_max_position_embeddings"] = original
    fields["rope_scaling"] = {
        "rope_type": "longrope",
        "short_factor": list(scaling.short_factors),
        "long_factor": list(scaling.long_factors),
    }
    if scaling.attention_factor != long_growth(original, longest):
        fields["rope_scaling"]["attention_factor"] = scaling.attention_factor
    return fields


# For a plan of memory. The factors of its positions are in its files.
_MINI = DecoderShape(
    vocab_size=200064,
    embed_dim=3072,
    blocks=32 * (Block(Attention(24, 8, 128, Rope(1e4, size=96)), Dense(8192)),),
    max_positions=4096,
    family="phi3",
)
_QKV = Weight("model.layers.{layer}.self_attn.qkv_proj", "blk.{layer}.attn_qkv")
_GATE_UP = Weight("model.layers.{layer}.mlp.gate_up_proj", "blk.{layer}.ffn_up")
FAMILY = Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    read=read,
    write=write,
    weights=WEIGHTS | {"q": _QKV, "k": _QKV, "v": _QKV, "gate": _GATE_UP, "up": _GATE_UP},
    tool_format="phi",
    shapes={"microsoft/Phi-4-mini-instruct": _MINI},
)
