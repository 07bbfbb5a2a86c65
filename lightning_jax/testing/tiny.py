"""Random models and tokenizers small enough for a test, and settings for a run of seconds."""

from dataclasses import replace
from typing import Any

import jax
import tokenizers
from tokenizers import decoders, models, normalizers

from lightning_jax.models.config import LoraConfig
from lightning_jax.models.formats.find import CHATML as CHATML
from lightning_jax.models.formats.find import tiny_shape
from lightning_jax.models.formats.find import tiny_tokenizer as tiny_tokenizer
from lightning_jax.models.formats.load import LoadedModel
from lightning_jax.models.formats.param_names import flatten, unflatten
from lightning_jax.models.lora import adapted
from lightning_jax.models.model_files import TINY
from lightning_jax.models.shape import DecoderConfig
from lightning_jax.models.transformer import Params, init_params

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
_SPECIAL = ("<unk>", "<s>", "</s>")
_BYTES = (*b" \n", *range(ord("a"), ord("z") + 1), *range(0x80, 0xF5))  # characters need no others
_WORDS = ("▁the", "▁red", "▁fox", "the", "red")


def tiny_model(seed: int = 0, *, num_layers: int = 2, embed_dim: int = 32) -> LoadedModel:
    """Return the model `tiny` with random float32 weights."""
    config = DecoderConfig(tiny_shape(num_layers=num_layers, embed_dim=embed_dim))
    params = init_params(config, jax.random.key(seed))
    return LoadedModel(TINY, config, params, tiny_tokenizer())


def with_mixers(config: DecoderConfig, **changes: Any) -> DecoderConfig:
    """Return the config with some fields of all mixers changed."""
    blocks = config.shape.blocks
    changed = (replace(block, mixer=replace(block.mixer, **changes)) for block in blocks)
    return config.with_shape(blocks=tuple(changed))


def windowed(model: LoadedModel, window: int, period: int) -> LoadedModel:
    """Return the model with a window in all layers but the last one of each period."""
    blocks = model.config.shape.blocks
    local = with_mixers(model.config, window=window).shape.blocks
    mixed = [*local]
    mixed[period - 1 :: period] = blocks[period - 1 :: period]
    return replace(model, config=model.config.with_shape(blocks=tuple(mixed)))


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


def sentencepiece() -> tokenizers.Tokenizer:
    """Return a small vocabulary like Llama 2's: ▁ for a blank, and bytes where a word is unknown.

    It writes a blank before the first word of a text, and drops it when decoding.
    """
    names = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in _BYTES), "▁"]
    names += [chr(code) for code in range(ord("a"), ord("z") + 1)]
    vocabulary, merges = {name: index for index, name in enumerate(names)}, []
    for word in _WORDS:
        for size in range(2, len(word) + 1):
            if word[:size] not in vocabulary:
                merges.append((word[: size - 1], word[size - 1]))
                vocabulary[word[:size]] = len(vocabulary)
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(  # type: ignore[assignment]
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(  # type: ignore[assignment]
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_tokens(
        [tokenizers.AddedToken(name, special=True, normalized=False) for name in _SPECIAL]
    )
    return backend
