"""MLP of three dense products, a(x G) * (x U) D, where a is the activation.

Parameters: gate, up /kernel [E, M]   down/kernel [M, E]
"""

from functools import partial

import flax.linen as nn

from lightning_jax.models.blocks.parts import Axes, Hidden, Parts, Width
from lightning_jax.models.shape import Dense

KERNELS = ("gate", "up", "down")
ADAPTED = KERNELS
AXES: dict[tuple[str, str], Axes] = {
    ("gate", "kernel"): ("embed", "mlp"),
    ("up", "kernel"): ("embed", "mlp"),
    ("down", "kernel"): ("mlp", "embed"),
}
_ACTIVATIONS = {"silu": nn.silu, "gelu_tanh": partial(nn.gelu, approximate=True)}


def apply(spec: Dense, parts: Parts, x: Hidden) -> Hidden:
    """Return the MLP of each token."""
    gate, up = (parts.kept_linear(name, x, spec.size) for name in ("gate", "up"))
    return parts.linear("down", _ACTIVATIONS[spec.activation](gate) * up, x.shape[-1])


def units(spec: Dense) -> dict[str, int]:
    """Return the number of units of each logical axis that are never split: features here."""
    return {"mlp": spec.size}


def activations(spec: Dense, embed_dim: int) -> dict[str, Width]:
    """Return what a layer keeps of one token for its backward pass, by its name in `KEPT`."""
    return dict.fromkeys(("gate", "up", "gated"), Width("mlp", spec.size))


def shares(spec: Dense) -> dict[str, float]:
    """Return the share of a kernel's weights with which a token is multiplied, if not all."""
    return {}
