"""Granite 3 and 4.1, dense: Llama with four factors."""

from dataclasses import replace
from typing import Any

from lightning_jax.models.families.dense import read_dense, write_dense
from lightning_jax.models.families.family import Family
from lightning_jax.models.families.fields import Fields
from lightning_jax.models.families.llama import WEIGHTS
from lightning_jax.models.model_files import ModelError
from lightning_jax.models.shape import DecoderShape

_ROTATED = "rope.scaling.finetuned"  # in GGUF, where False means that nothing is rotated


def read(fields: Fields) -> DecoderShape:
    """Return the shape of a model."""
    if not fields.value(None, _ROTATED, bool, True):
        raise ModelError.unsupported(
            _ROTATED,
            f"{fields.where} has {_ROTATED}=false, so its positions are not rotated, which is not "
            "supported; load the Hugging Face directory of this model instead",
        )
    return with_factors(fields, read_dense(fields))


def with_factors(fields: Fields, shape: DecoderShape) -> DecoderShape:
    """Return the shape with the four factors that Granite's files have."""
    scale = fields.factor("attention_multiplier", "attention.scale")
    residual_scale = fields.factor("residual_multiplier", "residual_scale", 1.0)
    blocks = [
        replace(block, mixer=replace(block.mixer, scale=scale), residual_scale=residual_scale)
        for block in shape.blocks
    ]
    return replace(
        shape,
        blocks=tuple(blocks),
        embed_scale=fields.factor("embedding_multiplier", "embedding_scale", 1.0),
        logit_divisor=fields.factor("logits_scaling", "logit_scale", 1.0),
    )


def write(shape: DecoderShape) -> dict[str, Any]:
    """Return the fields of config.json."""
    block = shape.blocks[0]
    return write_dense(shape) | {
        "attention_multiplier": block.mixer.scale,
        "residual_multiplier": block.residual_scale,
        "embedding_multiplier": shape.embed_scale,
        "logits_scaling": shape.logit_divisor,
    }


FAMILY = Family(
    name="granite",
    architecture="GraniteForCausalLM",
    read=read,
    write=write,
    weights=WEIGHTS,
)
