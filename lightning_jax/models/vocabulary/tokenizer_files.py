"""Tokens, chat templates and ends of response that the files beside tokenizer.json declare.

Tokens are read as transformers reads them. `added_tokens_decoder` of tokenizer_config.json counts
if it is there. Older models have special_tokens_map.json and added_tokens.json in its place.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from lightning_jax.models.model_files import ModelError, read_object, read_text, unusable
from lightning_jax.system.text import in_one_line

_DECODER = "added_tokens_decoder"
_SAVE_AGAIN = "save the tokenizer again with transformers' AutoTokenizer"
_NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# Settings of a tokenizer that change no token here, and their types. A saved policy has them.
HABITS = {
    "model_max_length": (int, float),
    "padding_side": (str,),
    "truncation_side": (str,),
    "model_input_names": (list,),
}
_LISTS = ("extra_special_tokens", "additional_special_tokens")


@dataclass(frozen=True)
class NamedTokens:
    """Special tokens that a model's files name, as texts."""

    names: Mapping[str, str]  # by their name, such as eos_token
    others: Sequence[str]

    @property
    def texts(self) -> dict[str, str]:
        """Texts of the tokens that chat templates may use by their names."""
        return {name: self.names[name] for name in _NAMES if name in self.names}


def named_tokens(directory: Path, settings: Mapping[str, Any]) -> NamedTokens:
    """Return the special tokens that the files name.

    `settings` are those of tokenizer_config.json. Where special_tokens_map.json counts, it comes
    first. Otherwise it only names what `settings` does not. Raises ModelError for a malformed file.
    """
    older = read_object(directory / "special_tokens_map.json")
    merged = {**older, **settings} if _DECODER in settings else {**settings, **older}
    tokens = {n: v for n, v in merged.items() if n.endswith("_token") and isinstance(v, str | dict)}
    with _known_form(directory):
        names = {name: _text(token) for name, token in tokens.items() if token}
        lists = [merged[name] for name in _LISTS if merged.get(name)]
        others = [
            _text(token)
            for listed in lists
            for token in (listed.values() if isinstance(listed, dict) else listed)
        ]
    return NamedTokens(names, others)


def add_declared(
    backend: tokenizers.Tokenizer,
    directory: Path,
    settings: Mapping[str, Any],
    named: NamedTokens,
) -> None:
    """Add the declared tokens that the vocabulary lacks, in the order of their ids.

    Make those that it has special if they are declared so. Raises ModelError for a malformed file.
    """
    special = [*named.names.values(), *named.others]
    special_texts = set(special)
    with _known_form(directory):
        if _DECODER in settings:
            declared = {int(i): _token(fields) for i, fields in settings[_DECODER].items()}
        else:
            older = read_object(directory / "added_tokens.json")
            declared = {
                int(i): _token({"content": text, "special": text in special_texts})
                for text, i in older.items()
            }
        tokens = backend.get_added_tokens_decoder()
        declared |= {} if _DECODER in settings else tokens
        unknown = [
            token
            for _, token in sorted(declared.items(), key=lambda pair: pair[0])
            if repr(token) not in set(map(repr, tokens.values()))
        ]
        texts = {token.content for token in (*tokens.values(), *unknown)}
        unknown += [
            _token({"content": text, "special": True}) for text in special if text not in texts
        ]
        for token in unknown:
            token.special = token.special or token.content in special_texts
        backend.add_tokens(list(unknown))


@contextlib.contextmanager
def _known_form(directory: Path) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as fault:
        raise ModelError.malformed(
            _DECODER,
            f"{directory} declares added tokens in a form that is not known "
            f"({in_one_line(repr(fault))}); {_SAVE_AGAIN}",
        ) from fault


def _text(token: Any) -> str:
    text = token["content"] if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise TypeError(f"the text of a token is {text!r}")
    return text


def _token(fields: Mapping[str, Any]) -> tokenizers.AddedToken:
    names = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    values = {name: fields[name] for name in names if name in fields}
    content = values.pop("content")
    values = {"normalized": not values.get("special", False)} | values
    return tokenizers.AddedToken(content, **values)


def declared_ends(directory: Path) -> set[int]:
    """Return the ids that generation_config.json, or else config.json, declares as ends.

    Raises ModelError for values that are no ids.
    """
    for name in ("generation_config.json", "config.json"):
        declared = read_object(directory / name).get("eos_token_id")
        if declared is None:
            continue
        ids = declared if isinstance(declared, list) else [declared]
        if wrong := [i for i in ids if not isinstance(i, int) or abs(i) >= 2**31]:
            where, expected = directory / name, "a token's id or a list"
            raise unusable(where, "eos_token_id", wrong[0], expected, _SAVE_AGAIN)
        return {i for i in ids if type(i) is int and i >= 0}
    return set()


def read_habits(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the HABITS of tokenizer_config.json, without those of another type."""
    return {name: settings[name] for name in HABITS if type(settings.get(name)) in HABITS[name]}


def read_templates(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name, as transformers finds them. Raises ModelError."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        others = sorted((directory / "additional_chat_templates").glob("*.jinja"))
        named = {"default": path} | {other.stem: other for other in others}
        return {name: read_text(file) for name, file in named.items()}
    template = settings.get("chat_template")
    if template is None:
        return {}
    entries = (
        template if isinstance(template, list) else [{"name": "default", "template": template}]
    )
    for entry in entries:  # several named templates
        texts = [entry.get(n) for n in ("name", "template")] if isinstance(entry, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            where, expected = directory / "tokenizer_config.json", "a text or a list of named texts"
            raise unusable(where, "chat_template", template, expected, _SAVE_AGAIN)
    return {entry["name"]: entry["template"] for entry in entries}
