"""Qwen3-MoE: Qwen3 with experts in every layer."""

from typing import Any

from lightning_jax.models.families.dense import NO_WINDOW, QK_NORMS, WEIGHTS, write_dense
from lightning_jax.models.families.family import Family, Weight
from lightning_jax.models.families.fields import MAX_SIZE, Fields
from lightning_jax.models.shape import Attention, Block, DecoderShape, Experts, Norm, Rope

MAX_EXPERTS = 2**14  # of a layer; published models have up to 512


def read(fields: Fields) -> DecoderShape:
    """Return the shape of a model whose layers all have experts."""
    fields.require(**NO_WINDOW, hidden_act="silu", attention_bias=False)
    fields.require(decoder_sparse_step=1)
    if fields.has("mlp_only_layers"):
        fields.require(mlp_only_layers=[])
    sizes = fields.sizes(head_dim=128)
    # The first name is that of transformers 5, the second that of published files.
    named = "num_local_experts" if fields.has("num_local_experts") else "num_experts"
    number = fields.size(named, "expert_count", MAX_EXPERTS)
    experts = Experts(
        number,
        fields.size("num_experts_per_tok", "expert_used_count", number),
        fields.size("moe_intermediate_size", "expert_feed_forward_length", MAX_SIZE),
        # A GGUF file says so only if it is otherwise.
        fields.value("norm_topk_prob", "expert_weights_norm", bool, default=fields.is_gguf),
    )
    mixer = sizes.attention(fields.rope(sizes.head_dim), qk_norm="head")
    return sizes.decoder(Block(mixer, experts))


def write(shape: DecoderShape) -> dict[str, Any]:
    """Return the fields of config.json."""
    experts = shape.blocks[0].mlp
    assert isinstance(experts, Experts)
    return (
        write_dense(shape)
        | NO_WINDOW
        | {
            # The size of dense layers, of which there are none.
            "intermediate_size": experts.chosen * experts.size,
            "num_experts": experts.number,
            "num_experts_per_tok": experts.chosen,
            "moe_intermediate_size": experts.size,
            "norm_topk_prob": experts.renormalise,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    )


def _experts(name: str, stacked: str, gguf: str) -> Weight:
    inside = "model.layers.{layer}.mlp.experts."
    config = f"{inside}{{expert}}.{name}_proj"
    return Weight(config, f"blk.{{layer}}.{gguf}", stacked=f"{inside}{stacked}_proj")


_30B = DecoderShape(
    vocab_size=151936,
    embed_dim=2048,
    blocks=48 * (Block(Attention(32, 4, 128, Rope(1e6), qk_norm="head"), Experts(128, 8, 768)),),
    norm=Norm(1e-6),
    tie_embeddings=False,
    max_positions=40960,
    family="qwen3_moe",
)

FAMILY = Family(
    name="qwen3_moe",
    gguf="qwen3moe",
    has_experts=True,
    architecture="Qwen3MoeForCausalLM",
    read=read,
    write=write,
    weights={name: one for name, one in WEIGHTS.items() if name not in ("gate", "up", "down")}
    | QK_NORMS
    | {
        "router": Weight("model.layers.{layer}.mlp.gate", "blk.{layer}.ffn_gate_inp"),
        "experts_gate": _experts("gate", "gate_up", "ffn_gate_exps"),
        "experts_up": _experts("up", "gate_up", "ffn_up_exps"),
        "experts_down": _experts("down", "down", "ffn_down_exps"),
    },
    shapes={"Qwen/Qwen3-30B-A3B": _30B},
)
