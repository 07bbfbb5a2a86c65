"""Shape of a model, which is a tuple of blocks, and how it is computed. Imports no JAX.

Blocks have shapes only, so that equal ones are computed by one program. `Execution` is beside them.
"""

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning_jax.errors import InvalidValue
from lightning_jax.models.config import LoraConfig

USUAL_VOCABULARY = 49152  # tokens, as SmolLM2's


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's scaling of slow rotary frequencies, for contexts longer than in pretraining."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class LinearScaling:
    """Division of every rotary frequency by a factor, as if positions were closer together."""

    factor: float


@dataclass(frozen=True)
class LongRope:
    """Phi's factors of rotary wavelengths, one for each pair: up to a length, and beyond it.

    Positions beyond it are not computed. Queries and keys grow by `attention_factor` where they
    are rotated.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_positions: int
    max_positions: int  # with the long factors
    attention_factor: float


@dataclass(frozen=True)
class Rope:
    """Rotary positions of a layer's queries and keys."""

    theta: float = 10000.0
    scaling: RopeScaling | LinearScaling | LongRope | None = None
    size: int | None = None  # first elements of each head, which are rotated; None: all


@dataclass(frozen=True)
class Attention:
    """Mixer of a block: attention of `heads` query heads to `kv_heads` key heads."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None = Rope()  # None: queries and keys are not rotated
    bias: bool = False  # added to queries, keys and values, as in Qwen2
    # RMS norm of queries and keys: of each head, as in Qwen3, or of all heads, as in OLMo 2.
    qk_norm: Literal["head", "projection"] | None = None
    scale: float | None = None  # of the products of queries and keys; None: head_dim**-0.5
    window: int | None = None  # number of tokens a token sees, itself and those before; None: all

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise InvalidValue.mismatch(
                "num_heads",
                f"num_heads={self.heads} is not a multiple of num_kv_heads={self.kv_heads}",
            )
        if self.head_dim % 2:
            raise InvalidValue.invalid(
                "head_dim", f"head_dim is {self.head_dim}; must be even for rotary embeddings"
            )
        if self.window is not None and self.window < 1:
            raise InvalidValue.out_of_range(
                "window", f"window is {self.window}; must be 1 or more, or None to see all tokens"
            )


@dataclass(frozen=True)
class Dense:
    """MLP of a block: two products of `size` features, one gated by the other."""

    size: int
    activation: Literal["silu", "gelu_tanh"] = "silu"  # of the gate; the second is an approximation


@dataclass(frozen=True)
class Experts:
    """MLP of a block: `chosen` of `number` MLPs of `size` features for each token."""

    number: int
    chosen: int
    size: int
    renormalise: bool = True  # the weights of a token's experts are divided by their sum

    def __post_init__(self) -> None:
        if self.chosen > self.number:
            raise InvalidValue.mismatch(
                "num_experts",
                f"num_experts={self.number} is less than the {self.chosen} experts of a token",
            )


@dataclass(frozen=True)
class Block:
    """Layer of a decoder: a mixer of tokens, then an MLP, both added to the layer's input."""

    mixer: Attention
    mlp: Dense | Experts
    # Of the inputs of the mixer and the MLP, of their results, or of both.
    norms: Literal["before", "after", "around"] = "before"
    residual_scale: float = 1.0  # of the results that are added to the layer's input


@dataclass(frozen=True)
class Norm:
    """RMS norms of a model."""

    eps: float = 1e-5
    is_wide: bool = False  # the scale multiplies in float32, before the result is rounded
    # Added to the stored scale in float32, where bfloat16 would round most of a small scale away.
    offset: float = 0.0

    def __post_init__(self) -> None:
        if self.offset and not self.is_wide:
            raise InvalidValue.mismatch(
                "offset", f"offset={self.offset:g} of norms needs is_wide=True"
            )


@dataclass(frozen=True)
class DecoderShape:
    """Blocks of a model and what is around them, as the files of its weights have them."""

    vocab_size: int
    embed_dim: int
    blocks: tuple[Block, ...]
    norm: Norm = Norm()
    embed_scale: float = 1.0  # of the embeddings, in their dtype, not of tied output weights
    logit_divisor: float = 1.0
    tie_embeddings: bool = True
    max_positions: int = 2048
    family: str = "llama"  # name in a saved model, see families/

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    @property
    def distinct_blocks(self) -> tuple[Block, ...]:
        """Blocks that differ, in the order of the first layer of each."""
        return tuple(dict.fromkeys(self.blocks))

    @property
    def period(self) -> int:
        """Smallest number of layers after which the blocks repeat."""
        blocks, number = self.blocks, len(self.blocks)
        return next(n for n in range(1, number + 1) if blocks[n:] == blocks[: number - n])

    @property
    def even_context(self) -> float:
        """Number of tokens whose attention takes as many operations as the layers' weights.

        A token takes 2 for each weight, and 4 for each number of a query and each token it sees.
        Infinite if windows keep attention below that.
        """
        weights, queries = 0, Counter[float]()
        for block in self.blocks:
            mixer = block.mixer
            heads = 2 * (mixer.heads + mixer.kv_heads) * mixer.head_dim
            weights += self.embed_dim * (heads + 3 * block.mlp.size)
            queries[mixer.window or math.inf] += mixer.heads * mixer.head_dim
        left, seen = weights / 2, 0.0
        for window in sorted(queries):  # layers with shorter windows see no more tokens
            growing = sum(number for other, number in queries.items() if other >= window)
            if seen + left / growing <= window:
                return seen + left / growing
            left, seen = left - growing * (window - seen), window
        return math.inf


@dataclass(frozen=True)
class Execution:
    """Computation of a model of any shape: its adapters, layout, dtype and loops."""

    lora: LoraConfig | None = None  # adapters among the parameters, of rank 1 or more
    num_adapters: int | None = None  # N per kernel, [N, ...], and a row chooses; None: one, [...]
    turned: bool = False  # kernels are kernel_t, which has no gradient (blocks/matmul.py)
    activation_dtype: str | None = None  # None: the dtype of the weights
    trains_router: bool = False  # False: the routers' weights have no gradient
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


def chunk_for(vocab_size: int, chunk: int) -> int:
    """Return the number of tokens whose logits are in memory at once.

    It is the chunk of a vocabulary of up to 49,152 tokens. For a larger one it is a divisor of
    that, so that the logits take about as much memory.
    """
    return nearest_divisor(chunk, chunk * min(1.0, USUAL_VOCABULARY / vocab_size))


def nearest_divisor(number: int, size: float) -> int:
    """Return the divisor whose ratio to `size` is nearest to 1."""
    divisors = (divisor for divisor in range(1, number + 1) if number % divisor == 0)
    return min(divisors, key=lambda divisor: abs(math.log(divisor / size)))
