"""Shapes of the models that are measured, so that no weights are needed."""

from typing import Any


def shape_of(name: str) -> Any:
    """Return the DecoderConfig of `tiny`, `135m`, `0.5b`, `1.5b` or `8b`."""
    from lightning_jax.models.families.table import SHAPES
    from lightning_jax.models.formats.find import tiny_shape
    from lightning_jax.models.shape import (
        Attention,
        Block,
        DecoderConfig,
        DecoderShape,
        Dense,
        Norm,
        Rope,
    )

    if name == "tiny":
        return DecoderConfig(tiny_shape())
    if name == "135m":  # SmolLM2-135M
        shape = DecoderShape(
            vocab_size=49152,
            embed_dim=576,
            blocks=30 * (Block(Attention(9, 3, 64, Rope(100000.0)), Dense(1536)),),
            max_positions=8192,
        )
    elif name == "0.5b":  # Qwen2.5-0.5B
        shape = DecoderShape(
            vocab_size=151936,
            embed_dim=896,
            blocks=24 * (Block(Attention(14, 2, 64, Rope(1e6), bias=True), Dense(4864)),),
            norm=Norm(1e-6),
            max_positions=32768,
            family="qwen2",
        )
    else:
        shape = SHAPES[{"1.5b": "Qwen/Qwen2.5-1.5B-Instruct", "8b": "Qwen/Qwen3-8B"}[name]]
    return DecoderConfig(shape)
