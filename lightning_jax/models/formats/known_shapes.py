"""Model shapes by hub id, so that a plan needs neither the weights nor the network."""

from lightning_jax.models.transformer import DecoderConfig

_QWEN = {"vocab_size": 151936, "rope_theta": 1e6, "norm_eps": 1e-6}
_QWEN_2_5_1_5B = DecoderConfig(
    **_QWEN,
    embed_dim=1536,
    mlp_dim=8960,
    num_layers=28,
    num_heads=12,
    num_kv_heads=2,
    head_dim=128,
    qkv_bias=True,
    max_positions=32768,
    family="qwen2",
)
_QWEN_3_8B = DecoderConfig(
    **_QWEN,
    embed_dim=4096,
    mlp_dim=12288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    tie_embeddings=False,
    qk_norm=True,
    max_positions=40960,
    family="qwen3",
)
SHAPES = {
    "Qwen/Qwen2.5-1.5B-Instruct": _QWEN_2_5_1_5B,
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": _QWEN_2_5_1_5B,
    "Qwen/Qwen3-8B": _QWEN_3_8B,
}
