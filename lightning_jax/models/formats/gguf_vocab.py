"""Byte-level BPE vocabulary from a GGUF file's metadata."""

from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from lightning_jax.models.formats.gguf_file import Contents
from lightning_jax.models.tokenizer import TOOL_TEMPLATE, Tokenizer, TokenizerError

_CONTROL, _USER_DEFINED = 3, 4  # GGUF's token types that are never split
_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}

# Patterns that cut a text into words before merging. They are part of each published vocabulary.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {
    "llama-bpe": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
    "qwen2": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",
}
_SINGLE_DIGITS = ("smollm",)
_ADDS_BOS = ("llama-bpe",)
_PLAIN = ("gpt-2", "default")


def read(file: Contents) -> Tokenizer:
    """Build the tokenizer from the metadata. Raises TokenizerError."""

    def value(name: str, default: Any = None) -> Any:
        return file.value(f"tokenizer.{name}", default)

    kind, pre = value("ggml.model"), value("ggml.pre", "default")
    if kind != "gpt2":
        raise TokenizerError(
            f"the GGUF file's tokenizer is {kind!r}; only 'gpt2' (byte-level BPE) is supported. "
            "Load the Hugging Face directory of this model instead.",
            reason="unsupported",
            key="tokenizer.ggml.model",
        )
    tokens, types = value("ggml.tokens"), value("ggml.token_type")
    backend = byte_level_bpe(tokens, value("ggml.merges", []), pre)
    for is_special in (True, False):
        wanted = _CONTROL if is_special else _USER_DEFINED
        backend.add_tokens(
            [
                tokenizers.AddedToken(token, special=is_special, normalized=False)
                for token, kind in zip(tokens, types, strict=True)
                if kind == wanted
            ]
        )
    ids = {name: value(f"ggml.{name}_token_id") for name in _NAMES}
    eos = {value(f"ggml.{name}_token_id") for name in ("eos", "eot", "eom")} - {None}
    # As in llama.cpp, Llama 3's vocabulary adds BOS to a text if the file does not say.
    adds = {"bos": value("ggml.add_bos_token"), "eos": value("ggml.add_eos_token")}
    if adds["bos"] is None:
        adds["bos"] = pre in _ADDS_BOS
    around = {name: tokens[ids[name]] for name in adds if adds[name] and ids[name] is not None}
    if around:
        parts = (around.get("bos"), "$A", around.get("eos"))
        backend.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single=[part for part in parts if part],
            special_tokens=[(token, ids[name]) for name, token in around.items()],
        )
    return Tokenizer(
        backend,
        template=value("chat_template"),
        tool_template=value(f"chat_template.{TOOL_TEMPLATE}"),
        eos_ids=eos,
        special_tokens={_NAMES[name]: tokens[i] for name, i in ids.items() if i is not None},
    )


def byte_level_bpe(tokens: list[str], merges: list[str], pre: str) -> tokenizers.Tokenizer:
    """Build a byte-level BPE tokenizer. `pre` is llama.cpp's name for the rule that cuts text."""
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    # Llama 3 uses a word in its vocabulary as one token, whatever the merges would give.
    whole_words = pre == "llama-bpe"
    bpe = models.BPE(vocabulary, pairs, ignore_merges=whole_words)  # type: ignore[arg-type]
    backend = tokenizers.Tokenizer(bpe)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()  # type: ignore[assignment]
    backend.pre_tokenizer = _pre_tokenizer(pre)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return backend


def _pre_tokenizer(pre: str) -> Any:
    if pre in _PATTERNS:
        cut = pre_tokenizers.Split(tokenizers.Regex(_PATTERNS[pre]), behavior="isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([cut, to_bytes])
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _SINGLE_DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), to_bytes])
    if pre in _PLAIN:
        return to_bytes
    known = sorted((*_PATTERNS, *_SINGLE_DIGITS, *_PLAIN))
    raise TokenizerError(
        f"the GGUF file's pre-tokenizer is {pre!r}; supported are {known}. "
        "Load the Hugging Face directory of this model instead.",
        reason="unsupported",
        key="tokenizer.ggml.pre",
    )
