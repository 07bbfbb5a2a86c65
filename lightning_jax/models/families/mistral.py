"""Mistral 7B v0.3 and others without a sliding window. In GGUF they are Llama's."""

from typing import Any

from lightning_jax.models.families.dense import read_dense, write_dense
from lightning_jax.models.families.family import Family
from lightning_jax.models.families.fields import Fields
from lightning_jax.models.families.llama import WEIGHTS
from lightning_jax.models.shape import DecoderShape

_NO_WINDOW = {"sliding_window": None}


def read(fields: Fields) -> DecoderShape:
    """Return the shape of a model without a sliding window."""
    fields.require(**_NO_WINDOW)
    return read_dense(fields)


def write(shape: DecoderShape) -> dict[str, Any]:
    """Return the fields of config.json."""
    return write_dense(shape) | _NO_WINDOW


FAMILY = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    read=read,
    write=write,
    weights=WEIGHTS,
    tool_format="mistral",
)
