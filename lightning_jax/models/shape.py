"""Shape of a model, and how it is computed. Imports no JAX."""

from dataclasses import dataclass

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
class DecoderConfig:
    """Shape of a model. It is hashable, so jit takes it as a static argument."""

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
    lora: LoraConfig | None = None  # adapters among the parameters, of rank 1 or more
    num_adapters: int | None = None  # N per kernel, [N, ...], and a row chooses; None: one, [...]
    turned: bool = False  # kernels are kernel_t, which has no gradient (matmul.py)
    activation_dtype: str | None = None  # None: the dtype of the weights
    scans_layers: bool = True  # with `remat`: a loop over stacked weights. False: layer by layer

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise InvalidValue(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}",
                reason="mismatch",
                key="num_heads",
            )
        if self.head_dim % 2:
            raise InvalidValue(
                f"head_dim is {self.head_dim}; must be even for rotary embeddings",
                reason="invalid",
                key="head_dim",
            )
