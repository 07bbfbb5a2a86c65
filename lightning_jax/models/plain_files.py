"""JSON files of a model, and the texts that Git LFS leaves in place of large files."""

import contextlib
import json
from pathlib import Path
from typing import Any

from lightning_jax.errors import Coded
from lightning_jax.system.text import in_one_line

_POINTER = b"version https://git-lfs.github.com/spec/"
MAX_BYTES = 2**26  # of JSON, which takes up to 60 times its size in memory
POINTER_ADVICE = (
    "is a Git LFS pointer without the file's contents; run `git lfs pull` in its folder"
)


def malformed(path: Path, expected: str, found: object, error: type[Coded]) -> Coded:
    """Return the error for a file that is not of the expected kind, or that is a pointer."""
    fault = POINTER_ADVICE if _is_pointer(path) else f"is not {expected}: {in_one_line(str(found))}"
    return error(f"{path} {fault}", reason="malformed", key=str(path))


def _is_pointer(path: Path) -> bool:
    """Return whether the file is what a clone without `git lfs` has instead of a large file."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(len(_POINTER)) == _POINTER
    return False


def read_object(path: Path, error: type[Coded]) -> dict[str, Any]:
    """Return the fields of a JSON file, none if there is no file. Raise `error` if it has none."""
    if not path.is_file():
        return {}
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ValueError(f"it has {size} bytes; expected at most {MAX_BYTES}")
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as fault:
        raise malformed(path, "readable JSON", fault, error) from fault
    if not isinstance(fields, dict):
        raise malformed(path, "a JSON object", type(fields).__name__, error)
    return fields


def read_text(path: Path, error: type[Coded]) -> str:
    """Return the text of a UTF-8 file. Raise `error` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as fault:
        raise malformed(path, "readable text", fault, error) from fault
