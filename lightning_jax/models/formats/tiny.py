"""Random model that compiles in seconds, with a real tokenizer made in memory.

An agent's plumbing can be tried on it. It learns little.
"""

import tokenizers
from tokenizers import pre_tokenizers

from lightning_jax.models.formats.gguf_vocab import byte_level_bpe
from lightning_jax.models.shape import DecoderShape
from lightning_jax.models.tokenizer import Tokenizer

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tiny_shape(*, num_layers: int = 2, embed_dim: int = 32) -> DecoderShape:
    """Return a shape with 4 query heads, 2 key heads, 259 tokens and tied embeddings."""
    return DecoderShape(
        vocab_size=256 + len(SPECIAL_TOKENS),
        embed_dim=embed_dim,
        mlp_dim=2 * embed_dim,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=embed_dim // 4,
        max_positions=2048,
    )


def tiny_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per byte, in the byte alphabet's order, then the specials.

    Its template is ChatML.
    """
    backend = byte_level_bpe(sorted(pre_tokenizers.ByteLevel.alphabet()), [], "gpt-2")
    backend.add_tokens(
        [tokenizers.AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS]
    )
    end_of_turn = 256 + SPECIAL_TOKENS.index("<|im_end|>")
    return Tokenizer(
        backend,
        template=CHATML,
        eos_ids=[end_of_turn],
        special_tokens={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    )
