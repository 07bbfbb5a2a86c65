"""Random model that compiles in seconds, with a real tokenizer (models/tiny_tokenizer.py).

An agent's plumbing can be tried on it. It learns little.
"""

from lightning_jax.models.tiny_tokenizer import SPECIAL_TOKENS
from lightning_jax.models.transformer import DecoderConfig


def tiny_config(*, num_layers: int = 2, embed_dim: int = 32) -> DecoderConfig:
    """Return a shape with 4 query heads, 2 key heads, 259 tokens and tied embeddings."""
    return DecoderConfig(
        vocab_size=256 + len(SPECIAL_TOKENS),
        embed_dim=embed_dim,
        mlp_dim=2 * embed_dim,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=embed_dim // 4,
        max_positions=2048,
    )
