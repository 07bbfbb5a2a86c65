"""Shape of a model, and how it is computed. Imports no JAX."""

from dataclasses import dataclass, replace
from typing import Any

from lightning_jax.errors import InvalidValue
from lightning_jax.models.config import LoraConfig


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's scaling of slow rotary frequencies, for contexts longer than in pretraining."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a model and constants of its formulas, as the files of its weights have them."""

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
    family: str = "llama"  # llama, qwen2 or qwen3, the name in a saved model

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise InvalidValue.mismatch(
                "num_heads",
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}",
            )
        if self.head_dim % 2:
            raise InvalidValue.invalid(
                "head_dim", f"head_dim is {self.head_dim}; must be even for rotary embeddings"
            )

    @property
    def even_context(self) -> float:
        """Number of tokens whose attention takes as many operations as a layer's weights.

        A token takes 2 for each weight, and 4 for each number of a query and each token it sees.
        """
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        weights = self.embed_dim * (2 * queries + 2 * keys + 3 * self.mlp_dim)
        return weights / (2 * queries)


@dataclass(frozen=True)
class Execution:
    """Computation of a model of any shape: its adapters, layout, dtype and loops."""

    lora: LoraConfig | None = None  # adapters among the parameters, of rank 1 or more
    num_adapters: int | None = None  # N per kernel, [N, ...], and a row chooses; None: one, [...]
    turned: bool = False  # kernels are kernel_t, which has no gradient (matmul.py)
    activation_dtype: str | None = None  # None: the dtype of the weights
    scans_layers: bool = True  # with `remat`: a loop over stacked weights. False: layer by layer


@dataclass(frozen=True)
class DecoderConfig:
    """Decoder of a shape and its execution, hashable, so that jit takes it as a static argument."""

    shape: DecoderShape
    execution: Execution = Execution()

    def with_shape(self, **changes: Any) -> "DecoderConfig":
        """Return the config with some fields of the shape changed."""
        return replace(self, shape=replace(self.shape, **changes))

    def with_execution(self, **changes: Any) -> "DecoderConfig":
        """Return the config with some fields of the execution changed."""
        return replace(self, execution=replace(self.execution, **changes))
