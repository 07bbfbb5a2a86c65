"""Qwen2 and Qwen2.5: queries, keys and values have biases."""

from typing import Any

from lightning_jax.models.families.dense import NO_WINDOW, WEIGHTS, read_dense, write_dense
from lightning_jax.models.families.family import Family
from lightning_jax.models.families.fields import Fields
from lightning_jax.models.shape import Attention, Block, DecoderShape, Dense, Norm, Rope


def read(fields: Fields) -> DecoderShape:
    """Return the shape of a model without a sliding window."""
    fields.require(**NO_WINDOW)
    return read_dense(fields, bias=True)


def write(shape: DecoderShape) -> dict[str, Any]:
    """Return the fields of config.json."""
    return write_dense(shape) | NO_WINDOW


_1_5B = DecoderShape(
    vocab_size=151936,
    embed_dim=1536,
    blocks=28 * (Block(Attention(12, 2, 128, Rope(1e6), bias=True), Dense(8960)),),
    norm=Norm(1e-6),
    max_positions=32768,
    family="qwen2",
)

FAMILY = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    read=read,
    write=write,
    weights=WEIGHTS,
    shapes={"Qwen/Qwen2.5-1.5B-Instruct": _1_5B, "Qwen/Qwen2.5-Coder-1.5B-Instruct": _1_5B},
)
