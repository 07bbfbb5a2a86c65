"""One decoder for the Llama, SmolLM2, Qwen2.5 and Qwen3 families: training, prefill and decode.

Parameters are a plain nested dict with one subtree a layer, so that a decode step reads each weight
where it lies:

    embed/embedding [V, E]   final_norm/scale [E]   head/kernel [E, V] unless embeddings are tied
    layers_0, layers_1, ...
        attn_norm, mlp_norm /scale [E]   q/kernel [E, H*D]   k, v /kernel [E, K*D]
        o/kernel [H*D, E]   gate, up /kernel [E, M]   down/kernel [M, E]
        q, k, v /bias (Qwen2)   q_norm, k_norm /scale [D] (Qwen3)
"""

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lightning_jax.models import attention
from lightning_jax.models.attention import RopeScaling
from lightning_jax.types import Leaf

Params = dict[str, Any]


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a model; hashable, so jit takes it as a static argument."""

    vocab_size: int
    embed_dim: int
    mlp_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = False  # Qwen3
    max_positions: int = 2048
    family: str = "llama"  # llama, qwen2 or qwen3: the name a saved model carries

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads}; "
                "expected each key head to serve the same number of query heads."
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim is {self.head_dim}; expected an even number, rotary pairs need it."
            )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values: tuples of L arrays [S, C, K, D], row = slot, index = position."""

    keys: tuple[Leaf, ...]
    values: tuple[Leaf, ...]


def init_cache(config: DecoderConfig, slots: int, length: int, dtype: Any = jnp.float32) -> KVCache:
    """An empty cache, zeros."""
    shape = (slots, length, config.num_kv_heads, config.head_dim)
    layers = range(config.num_layers)
    return KVCache(
        keys=tuple(jnp.zeros(shape, dtype) for _ in layers),
        values=tuple(jnp.zeros(shape, dtype) for _ in layers),
    )


class RMSNorm(nn.Module):
    """`x` over its root mean square, times a learned scale; computed in float32."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*rows E"]) -> Float[Array, "*rows E"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return wide.astype(x.dtype) * jnp.broadcast_to(scale, x.shape)


def _linear(features: int, name: str, bias: bool = False) -> nn.Dense:
    return nn.Dense(features, use_bias=bias, name=name, kernel_init=nn.initializers.normal(0.02))


class Layer(nn.Module):
    """One decoder layer: its output, and its updated keys and values where it got a cache."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: Any, rope: Any, ends: Any, cached: Any, view: Any) -> tuple[Any, Any]:
        config = self.config
        h = RMSNorm(config.norm_eps, name="attn_norm")(x)
        queries, keys, values = self._project(h, rope)
        if cached is None:
            mixed = attention.attend_tree(queries, keys, values, ends)
        else:
            cached = tuple(
                attention.write_rows(old, new, view.positions)
                for old, new in zip(cached, (keys, values), strict=True)
            )
            mixed = attention.attend_cache(queries, *cached, view)
        mixed = mixed.reshape(*mixed.shape[:2], config.num_heads * config.head_dim)
        x = x + _linear(config.embed_dim, "o")(mixed)
        h = RMSNorm(config.norm_eps, name="mlp_norm")(x)
        gate, up = _linear(config.mlp_dim, "gate")(h), _linear(config.mlp_dim, "up")(h)
        return x + _linear(config.embed_dim, "down")(nn.silu(gate) * up), cached

    def _project(self, h: Any, rope: Any) -> tuple[Any, Any, Any]:
        """Queries [B T H D], keys and values [B T K D]; queries and keys turned by position."""
        config = self.config
        parts = {}
        for name, heads in (
            ("q", config.num_heads),
            ("k", config.num_kv_heads),
            ("v", config.num_kv_heads),
        ):
            flat = _linear(heads * config.head_dim, name, config.qkv_bias)(h)
            parts[name] = flat.reshape(*flat.shape[:2], heads, config.head_dim)
        if config.qk_norm:
            parts["q"] = RMSNorm(config.norm_eps, name="q_norm")(parts["q"])
            parts["k"] = RMSNorm(config.norm_eps, name="k_norm")(parts["k"])
        return attention.rotate(parts["q"], *rope), attention.rotate(parts["k"], *rope), parts["v"]


class Decoder(nn.Module):
    """Tokens to hidden states after the final norm; `unembed` makes logits of those."""

    config: DecoderConfig

    @nn.compact
    def __call__(
        self,
        tokens: Any,
        positions: Any,
        ends: Any,
        cache: KVCache | None,
        remat: bool,
        attend_len: int | None,
    ) -> tuple[Any, KVCache | None]:
        config = self.config
        embed = nn.Embed(
            config.vocab_size,
            config.embed_dim,
            name="embed",
            embedding_init=nn.initializers.normal(0.02),
        )
        x = embed(tokens)
        frequencies = attention.rope_frequencies(
            config.head_dim, config.rope_theta, config.rope_scaling
        )
        rope = attention.rope_tables(positions, frequencies)
        view = None if cache is None else attention.CacheView(positions, attend_len)
        layer_class = nn.remat(Layer) if remat else Layer
        keys, values = [], []
        for i in range(config.num_layers):
            cached = None if cache is None else (cache.keys[i], cache.values[i])
            x, cached = layer_class(config, name=f"layers_{i}")(x, rope, ends, cached, view)
            if cached is not None:
                keys.append(cached[0])
                values.append(cached[1])
        x = RMSNorm(config.norm_eps, name="final_norm")(x)
        if not config.tie_embeddings and self.is_initializing():
            _linear(config.vocab_size, "head")(x)
        return x, None if cache is None else KVCache(tuple(keys), tuple(values))


def init_params(config: DecoderConfig, key: Any, dtype: Any = jnp.float32) -> Params:
    """Random parameters: normal with deviation 0.02, norms 1, biases 0."""
    tokens = jnp.zeros((1, 1), jnp.int32)

    @jax.jit
    def init(key: Any) -> Any:
        params = Decoder(config).init(key, tokens, tokens, None, None, False, None)["params"]
        return jax.tree.map(lambda leaf: leaf.astype(dtype), params)

    return init(key)


def forward(
    params: Params,
    config: DecoderConfig,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    *,
    ends: Int[Array, "B T"] | None = None,
    cache: KVCache | None = None,
    remat: bool = False,
    attend_len: int | None = None,
) -> tuple[Float[Array, "B T E"], KVCache | None]:
    """Hidden states after the final norm, and the given cache with these tokens written.

    Without a cache, node i of a row sees node j iff `j <= i < ends[j]` (plain causal without
    `ends`); `positions` only turn queries and keys. With a cache, row b is written to cache row b at
    index = position, and each token sees the indices up to its own, of the first `attend_len` where
    given. A position of C or more marks padding: nothing is written and its hidden state means
    nothing. Donate the cache at the jit boundary.
    """
    return Decoder(config).apply(
        {"params": params}, tokens, positions, ends, cache, remat, attend_len
    )


def unembed(
    params: Params, config: DecoderConfig, hidden: Float[Array, "*rows E"]
) -> Float[Array, "*rows V"]:
    """Logits, float32."""
    if config.tie_embeddings:
        kernel, axis = params["embed"]["embedding"], 1
    else:
        kernel, axis = params["head"]["kernel"], 0
    dims = (((hidden.ndim - 1,), (axis,)), ((), ()))
    return jax.lax.dot_general(
        hidden, kernel.astype(hidden.dtype), dims, preferred_element_type=jnp.float32
    )
