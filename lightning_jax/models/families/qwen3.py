"""Qwen3: each head of the queries and keys is normed."""

from typing import Any

from lightning_jax.models.families.dense import (
    NO_WINDOW,
    QK_NORMS,
    WEIGHTS,
    read_dense,
    write_dense,
)
from lightning_jax.models.families.family import Family
from lightning_jax.models.families.fields import Fields
from lightning_jax.models.shape import Attention, Block, DecoderShape, Dense, Norm, Rope


def read(fields: Fields) -> DecoderShape:
    """Return the shape of a model without a sliding window."""
    fields.require(**NO_WINDOW)
    return read_dense(fields, head_dim=128, qk_norm="head")


def write(shape: DecoderShape) -> dict[str, Any]:
    """Return the fields of config.json."""
    return write_dense(shape) | NO_WINDOW


_8B = DecoderShape(
    vocab_size=151936,
    embed_dim=4096,
    blocks=36 * (Block(Attention(32, 8, 128, Rope(1e6), qk_norm="head"), Dense(12288)),),
    norm=Norm(1e-6),
    tie_embeddings=False,
    max_positions=40960,
    family="qwen3",
)

FAMILY = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    read=read,
    write=write,
    weights=WEIGHTS | QK_NORMS,
    shapes={"Qwen/Qwen3-8B": _8B},
)
