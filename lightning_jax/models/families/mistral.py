"""Mistral 7B, of which v0.1 has a window in every layer. In GGUF it is Llama's, without one."""

from typing import Any

from lightning_jax.models.families.dense import read_dense, write_dense
from lightning_jax.models.families.family import Family
from lightning_jax.models.families.fields import MAX_SIZE, Fields
from lightning_jax.models.families.llama import WEIGHTS
from lightning_jax.models.shape import DecoderShape

_WINDOW = "sliding_window"


def read(fields: Fields) -> DecoderShape:
    """Return the shape of a model."""
    fields = fields.with_defaults(sliding_window=4096)  # as in transformers; null: none
    window = fields.size(_WINDOW, _WINDOW, MAX_SIZE) if fields.has(_WINDOW) else None
    return read_dense(fields, window=window)


def write(shape: DecoderShape) -> dict[str, Any]:
    """Return the fields of config.json."""
    return write_dense(shape) | {_WINDOW: shape.blocks[0].mixer.window}


FAMILY = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    read=read,
    write=write,
    weights=WEIGHTS,
    tool_format="mistral",
)
