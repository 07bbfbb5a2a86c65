"""Names of models, and the small files in a model's directory. Imports nothing heavy."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

from lightning_jax.errors import UserError
from lightning_jax.system.text import in_one_line

_POINTER = b"version https://git-lfs.github.com/spec/"
_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})(\.\w+)")
MAX_BYTES = 2**26  # of JSON, which takes up to 60 times its size in memory
POINTER_ADVICE = (
    "is a Git LFS pointer without the file's contents; run `git lfs pull` in its folder"
)
SMOLLM2 = "smollm2-135m-instruct"
TINY = "tiny"  # a random model, see models/formats/find.py
MERGED, ADAPTERS = "policy", "policy_adapter"  # folders of what a run exports
MAX_CHARS = 2000  # of an error


class ModelError(UserError, ValueError):
    """Error raised when a model or its tokenizer cannot be loaded; its text is one line.

    Names in it may come from the model's files.
    """

    def __init__(self, message: str = "", *, reason: str = "invalid", key: str | None = None):
        super().__init__(in_one_line(message, MAX_CHARS), reason=reason, key=key)


def malformed(path: Path, expected: str, value: object) -> ModelError:
    """Return the error for a file that is not of the expected kind, or that is a pointer."""
    fault = POINTER_ADVICE if _is_pointer(path) else f"is not {expected}: {in_one_line(str(value))}"
    return ModelError.malformed(str(path), f"{path} {fault}")


def unusable(
    where: object,
    name: str,
    value: object,
    expected: str,
    fix: str = "copy the model's own file there",
) -> ModelError:
    """Return the error for a field of a file that has an unusable value."""
    return ModelError.malformed(
        name,
        f"{where} has {in_one_line(name)}={in_one_line(repr(value), 80)}; expected {expected}; "
        f"{fix}",
    )


def _is_pointer(path: Path) -> bool:
    """Return whether the file is what a clone without `git lfs` has instead of a large file."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(len(_POINTER)) == _POINTER
    return False


def part_names(name: str) -> list[str]:
    """Return the names of all files of a model in numbered parts, of which this is one, or []."""
    if not (match := _PART.fullmatch(name)):
        return []
    stem, total, ending = match.groups()
    return [f"{stem}-{number:05}-of-{total}{ending}" for number in range(1, int(total) + 1)]


def read_object(path: Path) -> dict[str, Any]:
    """Return the fields of a JSON file, none if there is no file. Raises ModelError."""
    if not path.is_file():
        return {}
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ValueError(f"it has {size} bytes; expected at most {MAX_BYTES}")
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as fault:
        raise malformed(path, "readable JSON", fault) from fault
    if not isinstance(fields, dict):
        raise malformed(path, "a JSON object", type(fields).__name__)
    return fields


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file. Raises ModelError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as fault:
        raise malformed(path, "readable text", fault) from fault


def local_path(name: str) -> Path | None:
    """Return the directory or GGUF file of a model name, or None for a hub id or a known name.

    Raises ModelError if the name is neither.
    """
    path = Path(name).expanduser()
    if path.is_dir() or _is_gguf(path):
        return path
    if path.suffix == ".gguf":
        raise ModelError.not_found(str(path), f"GGUF file {path} does not exist; check the path")
    if path.is_file():
        raise ModelError(
            f"model {name!r} is a file; set model.name to its folder, {path.parent}, or to a GGUF "
            "file",
            reason="not_a_directory",
            key=name,
        )
    if name in (SMOLLM2, TINY):
        return None
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise ModelError.not_found(
            name,
            f"model {name!r} does not exist; expected a Hugging Face directory or hub id, a .gguf "
            f"file, or {SMOLLM2!r}",
        )
    return None


def _is_gguf(path: Path) -> bool:
    """Return whether the file is one of GGUF, by its name or by its first bytes."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return path.suffix == ".gguf" or file.read(4) == b"GGUF"


def read_chat_template(file: str | Path) -> str:
    """Return the text of the file that model.chat_template names. Raises ModelError."""
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(
            f"model.chat_template {str(file)!r} cannot be read ({error}); name a Jinja file",
            reason="unreadable",
            key="model.chat_template",
        ) from error
