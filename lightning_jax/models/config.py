"""Settings of the model, its adapters and its devices."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from lightning_jax.errors import require

AUTO = "auto"  # dtype: the fastest one on the devices here
KERNELS = ("q", "k", "v", "o", "gate", "up", "down")  # in each layer of a model


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters, trained instead of the model's weights."""

    rank: int = 0  # rank of each adapter; 0: no adapters, all weights are trained
    alpha: float = 16.0  # an adapter's output is scaled by alpha / rank
    targets: tuple[str, ...] = KERNELS  # kernels of each layer that have an adapter

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", tuple(self.targets))
        require(
            self,
            rank=(self.rank >= 0, "0 (no adapters) or more"),
            alpha=(0 < self.alpha < math.inf, "a positive number"),
            targets=(
                bool(self.targets)
                and set(self.targets) <= set(KERNELS)
                and len(set(self.targets)) == len(self.targets),
                f"some of {', '.join(KERNELS)}, each once",
            ),
        )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True)
class ModelConfig:
    """Settings of the model and its precision."""

    name: str = "smollm2-135m-instruct"  # name, Hugging Face directory or hub id, or .gguf file
    # Weights and activations: float32, bfloat16 or auto. auto takes the fastest dtype on the
    # devices here; on a CPU it is measured (models/precision.py). A run keeps its first choice.
    dtype: str = "float32"
    # None: same as `dtype`. float32 with bfloat16 weights: activations are rounded only for
    # products with weights and in the KV cache. On a CPU this is as fast as pure bfloat16.
    activation_dtype: str | None = None
    # Recompute activations in the backward pass: less memory, a third more time.
    remat: bool = False
    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        require(
            self,
            dtype=(self.dtype in ("float32", "bfloat16", AUTO), "float32, bfloat16 or auto"),
            activation_dtype=(
                self.activation_dtype is None
                or (self.activation_dtype == "float32" and self.dtype != AUTO),
                "none, because dtype=auto chooses it as well"
                if self.dtype == AUTO
                else "float32, or none for those of the weights",
            ),
        )


@dataclass(frozen=True)
class MeshConfig:
    """Number of devices along each mesh axis; -1 takes the remaining devices."""

    data: int = 1  # each device holds all weights and a share of the rows
    fsdp: int = -1  # each device holds a share of the weights and of the rows
    tensor: int = 1  # each device computes a share of every layer
    first_device: int = 0  # earlier devices are left for another mesh


@dataclass(frozen=True)
class PolicyConfig:
    """Settings of one of several policies.

    The policy is an adapter on the run's model if model.lora.rank is above 0, else a set of
    weights.
    """

    trains: bool = True  # False: only the warm-up trains it
    # Initial weights: a model with the shape and vocabulary of model.name. None: model.name, which
    # adapters always start from.
    base: str | None = None


def policy_indices(policies: Iterable[str]) -> dict[str, int]:
    """Return the index of each policy, and so of its adapter or weights, in order of `policies`."""
    return {name: index for index, name in enumerate(policies)}
