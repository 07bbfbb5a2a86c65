"""Model families that the decoder computes, and how each differs from Llama."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_jax.models.formats.names import ModelError
from lightning_jax.system.text import in_one_line


@dataclass(frozen=True)
class Family:
    architecture: str  # name of the model's class in transformers
    head_dim: int | None = None  # if a file does not say; None: embed_dim / num_heads
    qkv_bias: bool = False
    qk_norm: bool = False
    # Fields of config.json with the only value that this decoder computes.
    required_fields: Mapping[str, Any] = field(default_factory=dict)


_NO_WINDOW = {"use_sliding_window": False}

# By the name that files have: model_type in config.json, general.architecture in GGUF.
FAMILIES = {
    "llama": Family("LlamaForCausalLM"),  # SmolLM and SmolLM2 too
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, required_fields=_NO_WINDOW),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True, head_dim=128, required_fields=_NO_WINDOW),
}


def find_family(name: Any, where: object, key: str) -> Family:
    """Return the family of this name. Raises ModelError if there is none."""
    if not isinstance(name, str) or name not in FAMILIES:
        raise ModelError(
            f"{where} has {key}={in_one_line(repr(name), 80)}; supported are "
            f"{sorted(FAMILIES)}. Use a model of one of these families.",
            reason="unsupported",
            key=key,
        )
    return FAMILIES[name]


def refuse_experts(where: object, keys: Collection[str]) -> None:
    """Raise ModelError if a file has these fields of a mixture of experts."""
    for key in keys:
        raise ModelError(
            f"{where} is a mixture of experts ({key}), which is not supported; use a dense model "
            f"of one of the families {sorted(FAMILIES)}",
            reason="unsupported",
            key=key,
        )
