"""Table of the families that load, by the name in their files, and of known shapes by hub id."""

from collections.abc import Collection
from typing import Any

from lightning_jax.models.families import (
    gemma3,
    granite,
    granitemoehybrid,
    llama,
    mistral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    smollm3,
)
from lightning_jax.models.families.family import Family
from lightning_jax.models.model_files import ModelError
from lightning_jax.system.text import in_one_line

_MODULES = (
    *(gemma3, granite, granitemoehybrid, llama, mistral, olmo2, phi3, qwen2, qwen3, qwen3_moe),
    smollm3,
)
FAMILIES = {module.FAMILY.name: module.FAMILY for module in _MODULES}
# Families that people take for Gemma 3's, and what of them is not computed.
_GEMMA = {
    "gemma": "no family here reads its files",
    "gemma2": "the caps of its scores and logits are not computed",
}
SHAPES = {hub_id: shape for one in FAMILIES.values() for hub_id, shape in one.shapes.items()}


def find_family(name: Any, where: object, key: str) -> Family:
    """Return the family of this name. Raises ModelError if there is none."""
    if reason := _GEMMA.get(str(name)):
        raise ModelError.unsupported(
            key,
            f"{where} has {key}={name!r}, which is not supported, because {reason}; use a model of "
            "Gemma 3, such as google/gemma-3-1b-it",
        )
    if not isinstance(name, str) or name not in FAMILIES:
        raise ModelError.unsupported(
            key,
            f"{where} has {key}={in_one_line(repr(name), 80)}; supported are "
            f"{sorted(FAMILIES)}. Use a model of one of these families.",
        )
    return FAMILIES[name]


def refuse_experts(where: object, family: Any, keys: Collection[str]) -> None:
    """Raise ModelError if a file has these fields of a mixture of experts, unless its family does.

    `family` is its name in the file.
    """
    names = [name for one in FAMILIES.values() if one.has_experts for name in (one.name, one.gguf)]
    if family in names:
        return
    for key in keys:
        raise ModelError.unsupported(
            key,
            f"{where} is a mixture of experts ({key}), which is not supported for this family; use "
            f"a model of one of the families {sorted(FAMILIES)}",
        )
