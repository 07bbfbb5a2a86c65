"""Fields and weights that families of dense decoders with equal layers share."""

import dataclasses
from typing import Any

from lightning_jax.models.families.family import Weight
from lightning_jax.models.families.fields import SCALING, Fields
from lightning_jax.models.shape import Block, DecoderShape, Dense, LinearScaling, Rope

WEIGHTS = {
    "embed": Weight("model.embed_tokens", "token_embd"),
    "final_norm": Weight("model.norm", "output_norm"),
    "head": Weight("lm_head", "output"),
    "attn_norm": Weight("model.layers.{layer}.input_layernorm", "blk.{layer}.attn_norm"),
    "q": Weight("model.layers.{layer}.self_attn.q_proj", "blk.{layer}.attn_q"),
    "k": Weight("model.layers.{layer}.self_attn.k_proj", "blk.{layer}.attn_k"),
    "v": Weight("model.layers.{layer}.self_attn.v_proj", "blk.{layer}.attn_v"),
    "o": Weight("model.layers.{layer}.self_attn.o_proj", "blk.{layer}.attn_output"),
    "mlp_norm": Weight("model.layers.{layer}.post_attention_layernorm", "blk.{layer}.ffn_norm"),
    "gate": Weight("model.layers.{layer}.mlp.gate_proj", "blk.{layer}.ffn_gate"),
    "up": Weight("model.layers.{layer}.mlp.up_proj", "blk.{layer}.ffn_up"),
    "down": Weight("model.layers.{layer}.mlp.down_proj", "blk.{layer}.ffn_down"),
}
# Norms of queries and keys, of a family that has them.
QK_NORMS = {
    "q_norm": Weight("model.layers.{layer}.self_attn.q_norm", "blk.{layer}.attn_q_norm"),
    "k_norm": Weight("model.layers.{layer}.self_attn.k_norm", "blk.{layer}.attn_k_norm"),
}
NO_WINDOW = {"use_sliding_window": False}  # in config.json of Qwen's models


def read_dense(
    fields: Fields,
    *,
    head_dim: int | None = None,
    rope_theta: float = 10000.0,
    **attention: Any,
) -> DecoderShape:
    """Return a shape whose layers are Llama's, but for fields of their attention.

    `head_dim` and `rope_theta` are those of a file without them.
    """
    sizes = fields.sizes(head_dim=head_dim)
    fields.require(hidden_act="silu", attention_bias=False, mlp_bias=False)
    mixer = sizes.attention(fields.rope(sizes.head_dim, rope_theta), **attention)
    return sizes.decoder(Block(mixer, Dense(sizes.mlp_dim)))


def write_dense(shape: DecoderShape) -> dict[str, Any]:
    """Return the fields of config.json of a model whose layers differ in no more than their rope.

    Those that have one share it.
    """
    mixer, mlp = shape.blocks[0].mixer, shape.blocks[0].mlp
    ropes = {block.mixer.rope for block in shape.blocks if block.mixer.rope is not None}
    assert len({without_rope(block) for block in shape.blocks}) == 1 and len(ropes) <= 1
    rope = next(iter(ropes)) if ropes else Rope()
    fields: dict[str, Any] = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.embed_dim,
        "intermediate_size": mlp.size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.kv_heads,
        "max_position_embeddings": shape.max_positions,
        "head_dim": mixer.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm.eps,
        "tie_word_embeddings": shape.tie_embeddings,
        "rope_theta": rope.theta,
    }
    if isinstance(rope.scaling, LinearScaling):
        fields["rope_scaling"] = {"rope_type": "linear", "factor": rope.scaling.factor}
    elif rope.scaling is not None:
        scaling = zip(SCALING, dataclasses.astuple(rope.scaling), strict=True)
        fields["rope_scaling"] = {"rope_type": "llama3", **dict(scaling)}
    return fields


def without_rope(block: Block) -> Block:
    """Return the block with queries and keys that are not rotated."""
    return dataclasses.replace(block, mixer=dataclasses.replace(block.mixer, rope=None))
