"""SmolLM3: queries and keys of every fourth layer are not rotated."""

from dataclasses import replace
from typing import Any

from lightning_jax.models.families.dense import NO_WINDOW, read_dense, without_rope, write_dense
from lightning_jax.models.families.family import Family
from lightning_jax.models.families.fields import Fields
from lightning_jax.models.families.llama import WEIGHTS
from lightning_jax.models.model_files import unusable
from lightning_jax.models.shape import Attention, Block, DecoderShape, Dense, Norm, Rope

_LAYERS, _INTERVAL = "no_rope_layers", "no_rope_layer_interval"


def read(fields: Fields) -> DecoderShape:
    """Return the shape of a model without a sliding window."""
    fields.require(**NO_WINDOW)
    shape = read_dense(fields, rope_theta=2e6)
    # GGUF has none of these fields: its files are of models with one such layer in four.
    interval = fields.value(_INTERVAL, None, int, 4)
    if interval < 1:
        raise unusable(fields.where, _INTERVAL, interval, "a number of layers above 0")
    usual = [int((i + 1) % interval != 0) for i in range(shape.num_layers)]
    rotated = fields.value(_LAYERS, None, list, usual)  # 1 or 0 for each layer
    if len(rotated) < shape.num_layers or any(flag not in (0, 1) for flag in rotated):
        raise unusable(fields.where, _LAYERS, rotated, f"{shape.num_layers} times 0 or 1")
    pairs = zip(shape.blocks, rotated, strict=False)  # the list may be longer, as in transformers
    blocks = [block if is_rotated else without_rope(block) for block, is_rotated in pairs]
    return replace(shape, blocks=tuple(blocks))


def write(shape: DecoderShape) -> dict[str, Any]:
    """Return the fields of config.json."""
    rotated = {_LAYERS: [int(block.mixer.rope is not None) for block in shape.blocks]}
    return write_dense(shape) | NO_WINDOW | rotated


_3B = Block(Attention(16, 4, 128, Rope(5e6)), Dense(11008))
FAMILY = Family(
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    read=read,
    write=write,
    weights=WEIGHTS,
    tool_format="hermes",
    shapes={
        "HuggingFaceTB/SmolLM3-3B": DecoderShape(
            vocab_size=128256,
            embed_dim=2048,
            blocks=9 * (3 * (_3B,) + (without_rope(_3B),)),
            norm=Norm(1e-6),
            max_positions=65536,
            family="smollm3",
        )
    },
)
