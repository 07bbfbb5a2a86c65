"""Vocabulary from a GGUF file's metadata: byte-level BPE, or SentencePiece's BPE."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from lightning_jax.models.formats.gguf_file import FIX, WHERE, Contents
from lightning_jax.models.model_files import ModelError
from lightning_jax.models.tokenizer import TOOL_TEMPLATE, Tokenizer
from lightning_jax.system.text import in_one_line

_TOKENS, _TYPES, _MERGES = (f"tokenizer.ggml.{n}" for n in ("tokens", "token_type", "merges"))
_SCORES = "tokenizer.ggml.scores"
# GGUF's token types. Unknown, control and user-defined tokens are never split in a text.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_BLANK, _TAB = "\u2581", "<0x09>"  # SentencePiece's mark of a space, and its token of a tab
_END_OF_TURN = "<end_of_turn>"  # Gemma's, which not all of its files name as an end
_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}

# Patterns that cut a text into words before merging. They are part of each published vocabulary.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# A word begins at a capital letter, and a contraction ends it.
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?(?:{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*){_CONTRACTIONS}?"
_PATTERNS = {
    "llama-bpe": _LLAMA3,
    "dbrx": _LLAMA3,  # Granite 4, Phi-4
    "smaug-bpe": _LLAMA3,  # SmolLM3
    "gpt-4o": rf"{_CASED}|\p{{N}}{{1,3}}|" + _REST.replace(r"[\r\n]*", r"[\r\n/]*"),  # Phi-4-mini
    "qwen2": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",
}
_SINGLE_DIGITS = ("smollm", "refact")  # refact: Granite 3
_ADDS_BOS = ("llama-bpe",)
_PLAIN = ("gpt-2", "default")


def read_tokenizer(file: Contents) -> Tokenizer:
    """Build the tokenizer from the metadata. Raises ModelError."""

    kind = file.value("tokenizer.ggml.model", str)
    pre = file.needed("tokenizer.ggml.pre", str, "default")
    if kind not in ("gpt2", "llama"):
        raise ModelError.unsupported(
            "tokenizer.ggml.model",
            f"the GGUF file's tokenizer is {kind!r}; only 'gpt2' (byte-level BPE) and 'llama' "
            "(SentencePiece's BPE) are supported. Load the Hugging Face directory of this model "
            "instead.",
        )
    tokens, types = file.needed(_TOKENS, list), file.needed(_TYPES, list)
    if len(tokens) != len(types) or not all(isinstance(token, str) for token in tokens):
        raise _malformed(_TYPES, f"{len(types)} types for {len(tokens)} tokens")
    ids = {name: _token_id(file, name, len(tokens)) for name in (*_NAMES, "eot", "eom")}
    if kind == "llama":
        backend, tokens = _read_sentencepiece(file, tokens, types)
    else:
        backend = _read_byte_level(file, tokens, types, pre)
    ends = {ids.pop(name) for name in ("eot", "eom")} | {ids["eos"]}
    ends |= {tokens.index(_END_OF_TURN)} if _END_OF_TURN in tokens else set()
    # As in llama.cpp, these vocabularies add BOS to a text if the file does not say.
    adds = {
        "bos": file.value(
            "tokenizer.ggml.add_bos_token", bool, kind == "llama" or pre in _ADDS_BOS
        ),
        "eos": file.value("tokenizer.ggml.add_eos_token", bool),
    }
    named = {name: (tokens[i], i) for name, i in ids.items() if i is not None}
    around = {name: named[name] for name in adds if adds[name] and name in named}
    if around:
        backend.post_processor = _template(around)  # type: ignore[assignment]
    return Tokenizer(
        backend,
        template=file.value("tokenizer.chat_template", str),
        tool_template=file.value(f"tokenizer.chat_template.{TOOL_TEMPLATE}", str),
        eos_ids=[i for i in ends if i is not None],
        special_tokens={_NAMES[name]: token for name, (token, _) in named.items()},
    )


def _read_byte_level(
    file: Contents, tokens: list[str], types: list[Any], pre: str
) -> tokenizers.Tokenizer:
    merges = file.needed(_MERGES, list, [])
    try:
        backend = byte_level_bpe(tokens, merges, pre)
    except ModelError:
        raise
    except Exception as error:  # the Rust library raises nothing narrower
        raise _malformed(_MERGES, error) from error
    _add_tokens(backend, tokens, types, special=(_CONTROL,))
    return backend


def _add_tokens(
    backend: tokenizers.Tokenizer,
    tokens: Sequence[str],
    types: Sequence[Any],
    special: Sequence[int],
) -> None:
    """Add the tokens that are never split.

    User-defined ones with marks of blanks are looked for in a text that has these marks, too.
    """
    for is_special, kinds in ((True, special), (False, (_USER_DEFINED,))):
        backend.add_tokens(
            [
                tokenizers.AddedToken(
                    token,
                    special=is_special,
                    normalized=not is_special and _BLANK in token,
                )
                for token, kind in zip(tokens, types, strict=True)
                if kind in kinds
            ]
        )


def _read_sentencepiece(
    file: Contents, tokens: list[str], types: list[Any]
) -> tuple[tokenizers.Tokenizer, list[str]]:
    """Return the tokenizer, and the tokens by id, some of which the file spells otherwise."""
    scores = file.needed(_SCORES, list)
    if len(scores) != len(tokens) or not all(
        isinstance(score, int | float) and math.isfinite(score) for score in scores
    ):
        raise _malformed(_SCORES, f"{len(scores)} scores for {len(tokens)} tokens")
    has_prefix = file.needed("tokenizer.ggml.add_space_prefix", bool, True)
    tokens = [_spelled(token, kind) for token, kind in zip(tokens, types, strict=True)]
    if has_prefix:  # which would be put before these tokens, too, so they are joined as words are
        types = [
            _NORMAL if kind == _USER_DEFINED and _BLANK in token else kind
            for token, kind in zip(tokens, types, strict=True)
        ]
    if "\t" not in tokens and any("\t" in token for token in tokens):  # that a tab may begin
        tokens = ["\t" if token == _TAB else token for token in tokens]
    unknown = next((t for t, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    try:
        backend = sentencepiece_bpe(tokens, types, scores, unknown, has_prefix=has_prefix)
        _add_tokens(backend, tokens, types, special=(_UNKNOWN, _CONTROL))
    except Exception as error:  # the Rust library raises nothing narrower
        raise _malformed(_TOKENS, error) from error
    return backend, tokens


def _spelled(token: str, kind: Any) -> str:
    """Return a token as the vocabulary spells it. GGUF has user-defined ones as text."""
    return token.replace(" ", _BLANK) if kind == _USER_DEFINED else token


def sentencepiece_bpe(
    tokens: Sequence[str],
    types: Sequence[int],
    scores: Sequence[float],
    unknown: str | None,
    *,
    has_prefix: bool,
) -> tokenizers.Tokenizer:
    """Build a tokenizer of SentencePiece's BPE, with bytes for characters that no token has.

    Two neighbouring tokens are joined if both together are a normal one, that of the highest score
    first. A text begins with a blank if `has_prefix`.
    """
    vocabulary = {token: i for i, token in enumerate(tokens)}
    normal = [i for i, kind in enumerate(types) if kind == _NORMAL]
    by_score = sorted(normal, key=lambda i: (-scores[i], i))
    parts = {token for token, kind in zip(tokens, types, strict=True) if kind == _NORMAL}
    parts |= {"\t"} & vocabulary.keys()
    merges = [pair for i in by_score for pair in _splits(tokens[i]) if parts.issuperset(pair)]
    bpe = models.BPE(
        vocabulary,
        merges,
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(bpe)
    blanks: list[Any] = [normalizers.Replace(" ", _BLANK)]
    back: list[Any] = [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix:
        blanks.insert(0, normalizers.Prepend(_BLANK))
        back.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(blanks)  # type: ignore[assignment]
    backend.decoder = decoders.Sequence(back)  # type: ignore[assignment]
    return backend


def _splits(token: str) -> Iterator[tuple[str, str]]:
    """Yield the pairs of texts that make up a token."""
    return ((token[:end], token[end:]) for end in range(1, len(token)))


def _token_id(file: Contents, name: str, number: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    token_id = file.value(key, int)
    if token_id is not None and not 0 <= token_id < number:
        raise _malformed(key, f"{token_id} is no token of {number}")
    return token_id


def _template(around: Mapping[str, tuple[str, int]]) -> Any:
    """Return what adds these tokens around a text."""
    texts = {name: text for name, (text, _) in around.items()}
    single = [part for part in (texts.get("bos"), "$A", texts.get("eos")) if part]
    try:
        return processors.TemplateProcessing(single=single, special_tokens=[*around.values()])
    except ValueError as error:
        raise _malformed("tokenizer.ggml.add_bos_token", error) from error


def _malformed(key: str, value: object) -> ModelError:
    return ModelError.malformed(
        key, f"{WHERE}'s tokenizer is malformed at {key}: {in_one_line(str(value))}; {FIX}"
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
    supported = sorted((*_PATTERNS, *_SINGLE_DIGITS, *_PLAIN))
    raise ModelError.unsupported(
        "tokenizer.ggml.pre",
        f"the GGUF file's pre-tokenizer is {pre!r}; supported are {supported}. "
        "Load the Hugging Face directory of this model instead.",
    )
