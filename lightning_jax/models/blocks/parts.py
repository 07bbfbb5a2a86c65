"""Pieces of which the kinds of mixers and MLPs are built, and the inputs that layers share."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from lightning_jax.models.attention.attention import RopeTables
from lightning_jax.models.attention.kv_cache import Rows
from lightning_jax.models.blocks.matmul import matmul, matmul_turned
from lightning_jax.models.config import LoraConfig
from lightning_jax.models.shape import Execution, Norm

Hidden = Float[Array, "B T E"]
Input = Float[Array, "B T _"]
Output = Float[Array, "B T _"]
Axes = tuple[str | None, ...]  # logical axes of a parameter, see mesh.py


class LayerInputs(NamedTuple):
    """Inputs of a layer, besides weights, hidden states and the cache."""

    rope: RopeTables | None  # of the layer; None: it rotates nothing
    ends: Int[Array, "B T"] | None  # without a cache: see `transformer.forward`
    # With a cache: where the row's tokens are written. With a window: their depths in their trees.
    positions: Int[Array, "B T"] | None
    rows: Rows | None  # with a cache: its row for each row of the batch
    adapters: Int[Array, " B"] | None  # index for each row; None: the model has at most one


@dataclass(frozen=True)
class Width:
    """Numbers of one token in an activation: `units` of `size`, whole units on each device."""

    axis: str | None  # logical axis of the units
    units: int
    size: int = 1
    is_statistic: bool = False  # float32, and small beside the others
    gathers: str | None = None  # logical axis along which devices also have each other's tokens


class RMSNorm(nn.Module):
    """Division by the root mean square in float32, followed by a learned scale."""

    norm: Norm

    @nn.compact
    def __call__(self, x: Float[Array, "*rows E"]) -> Float[Array, "*rows E"]:
        usual = nn.initializers.constant(1.0 - self.norm.offset)
        scale = self.param("scale", usual, (x.shape[-1],))
        # Two axes, because XLA on a CPU takes ten times as long for sums over the last axis of 3.
        wide = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.norm.eps)
        scale = jnp.broadcast_to(scale, wide.shape)
        if self.norm.is_wide:
            scale = scale.astype(jnp.float32)
            scale = scale + self.norm.offset if self.norm.offset else scale
            return (wide * scale).astype(x.dtype).reshape(x.shape)
        return (wide.astype(x.dtype) * scale).reshape(x.shape)


class Linear(nn.Module):
    """Product with a kernel, plus an optional adapter and an optional bias."""

    features: int
    bias: bool = False
    lora: LoraConfig | None = None
    num_adapters: int | None = None
    turned: bool = False

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T _"], chosen: Int[Array, " B"] | None = None
    ) -> Float[Array, "B T _"]:
        init = nn.initializers.normal(0.02)
        if self.turned:
            kernel = self.param("kernel_t", init, (self.features, x.shape[-1]))
            out = matmul_turned(x, kernel).astype(x.dtype)
        else:
            out = matmul(x, self.param("kernel", init, (x.shape[-1], self.features)))
        if self.lora is not None:
            out = out + self._adapter(x, self.lora, chosen)
        if not self.bias:
            return out
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        return out + bias[None, None, :]

    def _adapter(
        self, x: Float[Array, "B T _"], lora: LoraConfig, chosen: Int[Array, " B"] | None
    ) -> Float[Array, "B T _"]:
        stack = () if self.num_adapters is None else (self.num_adapters,)
        init = nn.initializers.normal(x.shape[-1] ** -0.5)  # x A is about as large as x
        a = self.param("lora_a", init, (*stack, x.shape[-1], lora.rank))
        b = self.param("lora_b", nn.initializers.zeros, (*stack, lora.rank, self.features))
        if not stack:
            return matmul(lora.scale * matmul(x, a), b)
        low = jnp.einsum("bti,bir->btr", x, a[chosen])
        return jnp.einsum("btr,bro->bto", lora.scale * low, b[chosen])


class Stack(nn.Module):
    """Kernels of equal shape, stacked on a first axis."""

    shape: tuple[int, ...]

    @nn.compact
    def __call__(self) -> Float[Array, "N I O"]:
        kernels: Any = self.param("kernel", nn.initializers.normal(0.02), self.shape)
        return kernels


@dataclass(frozen=True)
class Parts:
    """Parameters of one layer, by name. Used inside the layer's compact method."""

    norm: Norm
    execution: Execution
    adapters: Int[Array, " B"] | None

    def linear(self, name: str, x: Input, features: int, *, bias: bool = False) -> Output:
        """Return the product with the kernel `name`, which has an adapter if `lora` targets it."""
        execution = self.execution
        lora = execution.lora
        adapter = lora if lora is not None and name in lora.targets else None
        layer = Linear(features, bias, adapter, execution.num_adapters, execution.turned, name=name)
        return layer(x, self.adapters)

    def kept_linear(self, name: str, x: Input, features: int, *, bias: bool = False) -> Output:
        """Return the product as a result that a backward pass may keep under this name."""
        return checkpoint_name(self.linear(name, x, features, bias=bias), name)

    def stack(self, name: str, *shape: int) -> Float[Array, "N I O"]:
        """Return kernels of equal shape, which never have adapters and are never transposed."""
        return Stack(shape, name=name)()

    def normed(self, name: str, x: Any) -> Any:
        """Return the RMS norm over the last axis, with the scale `name`."""
        return RMSNorm(self.norm, name=name)(x)
