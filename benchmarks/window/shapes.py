"""Shapes of the models that are measured, so that no weights are needed."""

from typing import Any


def shape_of(name: str) -> Any:
    """Return the DecoderConfig of `tiny`, `135m`, `0.5b`, `1.5b` or `8b`."""
    from lightning_jax.models.formats.families import SHAPES
    from lightning_jax.models.formats.find import tiny_shape
    from lightning_jax.models.shape import DecoderConfig, DecoderShape

    if name == "tiny":
        return DecoderConfig(tiny_shape())
    if name == "135m":  # SmolLM2-135M
        shape = DecoderShape(
            vocab_size=49152,
            embed_dim=576,
            mlp_dim=1536,
            num_layers=30,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            rope_theta=100000.0,
            max_positions=8192,
        )
    elif name == "0.5b":  # Qwen2.5-0.5B
        shape = DecoderShape(
            vocab_size=151936,
            embed_dim=896,
            mlp_dim=4864,
            num_layers=24,
            num_heads=14,
            num_kv_heads=2,
            head_dim=64,
            rope_theta=1e6,
            norm_eps=1e-6,
            qkv_bias=True,
            max_positions=32768,
            family="qwen2",
        )
    else:
        shape = SHAPES[{"1.5b": "Qwen/Qwen2.5-1.5B-Instruct", "8b": "Qwen/Qwen3-8B"}[name]]
    return DecoderConfig(shape)
