"""Llama 2 and 3, SmolLM and SmolLM2."""

from dataclasses import replace

import numpy as np

from lightning_jax.models.families import dense
from lightning_jax.models.families.family import Family
from lightning_jax.models.shape import Block


def _queries(rows: np.ndarray, block: Block | None) -> np.ndarray:
    assert block is not None
    return unpermuted(rows, block.mixer.heads)


def _keys(rows: np.ndarray, block: Block | None) -> np.ndarray:
    assert block is not None
    return unpermuted(rows, block.mixer.kv_heads)


def unpermuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of a query or key weight so that element i pairs with i + D/2.

    GGUF pairs neighbours: it stores a head of 4 rows in the order 0 2 1 3.
    """
    split = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


WEIGHTS = dense.WEIGHTS | {
    "q": replace(dense.WEIGHTS["q"], from_gguf=_queries),
    "k": replace(dense.WEIGHTS["k"], from_gguf=_keys),
}
FAMILY = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    read=dense.read_dense,
    write=dense.write_dense,
    weights=WEIGHTS,
)
