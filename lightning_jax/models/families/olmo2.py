"""OLMo 2: norms come after the mixer and the MLP, and all query or key heads share a norm."""

from lightning_jax.models.families.dense import QK_NORMS, WEIGHTS, write_dense
from lightning_jax.models.families.family import Family, Weight
from lightning_jax.models.families.fields import Fields
from lightning_jax.models.shape import Block, DecoderShape, Dense, Norm


def read(fields: Fields) -> DecoderShape:
    """Return the shape of a model."""
    sizes = fields.sizes()
    fields.require(hidden_act="silu", attention_bias=False)
    mixer = sizes.attention(fields.rope(sizes.head_dim), qk_norm="projection")
    block = Block(mixer, Dense(sizes.mlp_dim), norms="after")
    return sizes.decoder(block, norm=Norm(sizes.norm_eps, is_wide=True))


_LAYER = "model.layers.{layer}"
FAMILY = Family(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    read=read,
    write=write_dense,
    weights=WEIGHTS
    | QK_NORMS
    | {
        "attn_norm": Weight(
            f"{_LAYER}.post_attention_layernorm", "blk.{layer}.post_attention_norm"
        ),
        "mlp_norm": Weight(f"{_LAYER}.post_feedforward_layernorm", "blk.{layer}.post_ffw_norm"),
    },
)
