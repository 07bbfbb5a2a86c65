"""Random model small enough for a test, with a real tokenizer made in memory."""

from dataclasses import replace

import jax
import tokenizers
from tokenizers import pre_tokenizers

from lightning_jax.models.config import LoraConfig
from lightning_jax.models.formats.gguf_vocab import byte_level_bpe
from lightning_jax.models.formats.load import LoadedModel
from lightning_jax.models.formats.param_names import flatten, unflatten
from lightning_jax.models.lora import adapted
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.models.transformer import DecoderConfig, Params, init_params

# Settings for a run that takes seconds with this model.
TINY_RUN = {
    "num_steps": 1,
    "serve.slots": 1,
    "serve.max_len": 512,
    "serve.prefill_buckets": "[128]",
    "rollout.tasks_per_step": 1,
    "rollout.group_size": 2,
    "rollout.max_tokens": 4,
    "batch.row_len": 1024,
    "mesh.fsdp": 1,
}
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
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


def tiny_model(seed: int = 0, *, num_layers: int = 2, embed_dim: int = 32) -> LoadedModel:
    """Return random float32 weights: 4 query heads, 2 key heads, 259 tokens, tied embeddings."""
    tokenizer = tiny_tokenizer()
    config = DecoderConfig(
        vocab_size=tokenizer.vocab_size,
        embed_dim=embed_dim,
        mlp_dim=2 * embed_dim,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=embed_dim // 4,
        max_positions=2048,
    )
    params = init_params(config, jax.random.key(seed))
    return LoadedModel(name="tiny", config=config, params=params, tokenizer=tokenizer)


def tiny_policies(lora: LoraConfig, number: int = 2) -> LoadedModel:
    """Return a tiny model of one layer with several adapters that all give different outputs."""
    model = adapted(tiny_model(num_layers=1), lora, 0, number)
    return replace(model, params=_speaking(model.params))


@jax.jit
def _speaking(params: Params) -> Params:
    keys = iter(jax.random.split(jax.random.key(5), 99))
    leaves = {
        path: 0.3 * jax.random.normal(next(keys), leaf.shape) if path[-1] == "lora_b" else leaf
        for path, leaf in flatten(params).items()
    }
    return unflatten(leaves)
