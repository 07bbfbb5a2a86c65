"""Layer of a decoder, computed by the kinds of its block's mixer and MLP, and facts about them."""

from functools import cache
from types import ModuleType
from typing import Any

import flax.linen as nn

from lightning_jax.models.attention.kv_cache import LayerCache
from lightning_jax.models.blocks import dense, experts, self_attention
from lightning_jax.models.blocks.parts import Axes, Hidden, LayerInputs, Parts, Width
from lightning_jax.models.shape import Attention, Block, Dense, Execution, Experts, Norm

# A kind has KERNELS, those of them that adapters may change (ADAPTED), AXES, units, activations and
# shares. A mixer has over_row and over_cache too, and an MLP has apply.
KINDS: dict[type, ModuleType] = {Attention: self_attention, Dense: dense, Experts: experts}


class Layer(nn.Module):
    """Decoder layer that returns its output and, if given a cache, the updated cache.

    Parameters: attn_norm, mlp_norm /scale [E], and those of the mixer and of the MLP. With norms
    around, attn_norm and mlp_norm come before, and attn_post_norm, mlp_post_norm /scale [E] after.
    """

    block: Block
    norm: Norm
    execution: Execution

    @nn.compact
    def __call__(
        self, x: Hidden, inputs: LayerInputs, cached: LayerCache | None
    ) -> tuple[Hidden, LayerCache | None]:
        parts = Parts(self.norm, self.execution, inputs.adapters)
        h = self._before(parts, "attn", x)
        h, cached = self._mix(parts, h, inputs, cached)
        x = x + self._result(parts, "attn", h)
        mlp = self.block.mlp
        h = KINDS[type(mlp)].apply(mlp, parts, self._before(parts, "mlp", x))
        return x + self._result(parts, "mlp", h), cached

    def _mix(
        self, parts: Parts, x: Hidden, inputs: LayerInputs, cached: LayerCache | None
    ) -> tuple[Hidden, LayerCache | None]:
        mixer = self.block.mixer
        kind = KINDS[type(mixer)]
        if cached is None:
            return kind.over_row(mixer, parts, x, inputs), None
        return kind.over_cache(mixer, parts, x, inputs, cached)

    def _before(self, parts: Parts, name: str, x: Hidden) -> Hidden:
        return x if self.block.norms == "after" else parts.normed(f"{name}_norm", x)

    def _result(self, parts: Parts, name: str, x: Hidden) -> Hidden:
        """Return what the mixer or the MLP adds to the layer's input."""
        if self.block.norms != "before":
            kind = "norm" if self.block.norms == "after" else "post_norm"
            x = parts.normed(f"{name}_{kind}", x)
        return x if self.block.residual_scale == 1.0 else x * self.block.residual_scale


def _specs(block: Block) -> list[tuple[Any, Any]]:
    return [(spec, KINDS[type(spec)]) for spec in (block.mixer, block.mlp)]


def kernels_of(block: Block) -> tuple[str, ...]:
    """Return the names of the block's kernels, the mixer's first."""
    return tuple(name for _, kind in _specs(block) for name in kind.KERNELS)


def adapted_kernels_of(block: Block) -> tuple[str, ...]:
    """Return the names of the block's kernels that may have adapters."""
    return tuple(name for _, kind in _specs(block) for name in kind.ADAPTED)


def share_of(block: Block, kernel: str) -> float:
    """Return the share of a kernel's weights with which each token is multiplied."""
    return dict(pair for spec, kind in _specs(block) for pair in kind.shares(spec).items()).get(
        kernel, 1.0
    )


@cache
def axes_of(block: Block) -> dict[tuple[str, ...], Axes]:
    """Return the logical axes of the block's parameters that may be split, by their path.

    An adapter is sharded like its kernel. Its rank axis is never split.
    """
    axes = {key: value for _, kind in _specs(block) for key, value in kind.AXES.items()}
    adapters = {
        (name, leaf): (whole[0], None) if leaf == "lora_a" else (None, whole[1])
        for (name, kind), whole in axes.items()
        if kind == "kernel" and name in adapted_kernels_of(block)
        for leaf in ("lora_a", "lora_b")
    }
    return axes | adapters


def units_of(block: Block) -> dict[str, int]:
    """Return the number of units of each logical axis of the block that are never split."""
    return {axis: units for spec, kind in _specs(block) for axis, units in kind.units(spec).items()}


def activations_of(block: Block, embed_dim: int) -> dict[str, Width]:
    """Return what the mixer and the MLP keep of one token for a backward pass."""
    parts = (kind.activations(spec, embed_dim) for spec, kind in _specs(block))
    return {name: width for part in parts for name, width in part.items()}
