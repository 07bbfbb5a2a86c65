"""Chat templates and ends of response that the files beside tokenizer.json declare."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_jax.errors import Coded
from lightning_jax.models.plain_files import read_object, read_text
from lightning_jax.system.text import in_one_line


def declared_ends(directory: Path, error: type[Coded]) -> set[int]:
    """Return the ids that generation_config.json, or else config.json, declares as ends.

    Raise `error` for values that are no ids.
    """
    for name in ("generation_config.json", "config.json"):
        declared = read_object(directory / name, error).get("eos_token_id")
        if declared is None:
            continue
        ids = declared if isinstance(declared, list) else [declared]
        if wrong := [i for i in ids if not isinstance(i, int) or abs(i) >= 2**31]:
            raise _wrong_field(
                error, directory / name, "eos_token_id", wrong[0], "a token's id or a list"
            )
        return {i for i in ids if type(i) is int and i >= 0}
    return set()


def read_templates(
    directory: Path, settings: Mapping[str, Any], error: type[Coded]
) -> dict[str, str]:
    """Return the chat templates by name, as transformers finds them. Raise `error`."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        others = sorted((directory / "additional_chat_templates").glob("*.jinja"))
        named = {"default": path} | {other.stem: other for other in others}
        return {name: read_text(file, error) for name, file in named.items()}
    template = settings.get("chat_template")
    if template is None:
        return {}
    entries = (
        template if isinstance(template, list) else [{"name": "default", "template": template}]
    )
    for entry in entries:  # several named templates
        texts = [entry.get(n) for n in ("name", "template")] if isinstance(entry, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise _wrong_field(
                error,
                *(directory / "tokenizer_config.json", "chat_template", template),
                "a text or a list of named texts",
            )
    return {entry["name"]: entry["template"] for entry in entries}


def _wrong_field(error: type[Coded], path: Path, name: str, found: object, expected: str) -> Coded:
    return error(
        f"{path} has {name}={in_one_line(repr(found), 80)}; expected {expected}; save the "
        "tokenizer again with transformers' AutoTokenizer",
        reason="malformed",
        key=name,
    )
