"""JSON files of a model, and the texts that Git LFS leaves in place of large files."""

import json
from pathlib import Path
from typing import Any

from lightning_jax.errors import Coded

_POINTER = b"version https://git-lfs.github.com/spec/"
POINTER_ADVICE = (
    "is a Git LFS pointer without the file's contents; run `git lfs pull` in its folder"
)


def is_lfs_pointer(path: Path) -> bool:
    """Return whether the file is what a clone without `git lfs` has instead of a large file."""
    with path.open("rb") as file:
        return file.read(len(_POINTER)) == _POINTER


def malformed(path: Path, expected: str, found: object, error: type[Coded]) -> Coded:
    """Return the error for a file that is not of the expected kind, or that is a pointer."""
    fault = POINTER_ADVICE if is_lfs_pointer(path) else f"is not {expected}: {found}"
    return error(f"{path} {fault}", reason="malformed", key=str(path))


def read_object(path: Path, error: type[Coded]) -> dict[str, Any]:
    """Return the fields of a JSON file, none if there is no file. Raise `error` if it has none."""
    if not path.is_file():
        return {}
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as fault:
        raise malformed(path, "readable JSON", fault, error) from fault
    if not isinstance(fields, dict):
        raise malformed(path, "a JSON object", type(fields).__name__, error)
    return fields
