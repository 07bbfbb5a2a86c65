"""Paths in settings: relative to the file that holds them, and absolute in a saved file."""

import os
import shlex
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from lightning_jax.schema import PathKind, inner_section, path_kind

Section = TypeVar("Section", bound=Any)
Change = Callable[[str], str]  # from a path to another that names the same file


def below(folder: Path) -> Change:
    """Return a function that makes paths relative to `folder` relative to this directory."""

    def change(path: str) -> str:
        joined = os.path.join(folder, path)
        short = os.path.normpath(joined)
        # ".." after a symbolic link leads elsewhere than the text says.
        return short if os.path.realpath(short) == os.path.realpath(joined) else joined

    return change


def map_paths(node: Any, section: type, change: Change) -> Any:
    """Return a section's plain settings with other paths. Names that are no paths stay."""
    if not isinstance(node, dict):
        return node
    changed = dict(node)
    for field in fields(section):  # pyright: ignore[reportArgumentType]
        value = node.get(field.name)
        inner, kind = inner_section(field.type), path_kind(field.type)
        if inner and inner.is_dict and isinstance(value, dict):
            changed[field.name] = {k: map_paths(v, inner.section, change) for k, v in value.items()}
        elif inner:
            changed |= {field.name: map_paths(value, inner.section, change)} if value else {}
        elif kind and value is not None:
            changed[field.name] = _mapped(value, kind, change)
    return changed


def absolute_paths(section: Section) -> Section:
    """Return a section whose paths lead to the same files from any working directory."""
    changes: dict[str, Any] = {}
    for field in fields(section):
        value, kind = getattr(section, field.name), path_kind(field.type)
        if kind and value is not None:
            changes[field.name] = _mapped(value, kind, os.path.abspath)
        elif is_dataclass(value):
            changes[field.name] = absolute_paths(value)  # pyright: ignore[reportArgumentType]
        elif isinstance(value, dict) and any(map(is_dataclass, value.values())):
            changes[field.name] = {name: absolute_paths(held) for name, held in value.items()}
    return replace(section, **changes)


def file_of(reference: str) -> str | None:
    """Return FILE of `FILE:FUNCTION`, or None for MODULE:FUNCTION and plain names."""
    file, _, _ = reference.rpartition(":")
    is_module = not file.endswith(".py") and all(map(str.isidentifier, file.split(".")))
    return file if file and not is_module else None


def _mapped(value: Any, kind: PathKind, change: Change) -> Any:
    if kind is PathKind.COMMAND:
        return _mapped_command(value, change)
    if not isinstance(value, str) or value.startswith("${"):  # from another setting
        return value
    if kind is PathKind.FUNCTION:
        file = file_of(value)
        return value if file is None else change(file) + value[len(file) :]
    if kind is PathKind.PROGRAM:
        return change(value) if "/" in value else value
    return _mapped_name(value, change)


def _mapped_name(value: str, change: Change) -> str:
    """Change a path that exists or begins with a dot. Anything else may be the name of a model."""
    path = change(value)
    if value.startswith((".", "/")):
        return path if path.startswith((".", "/")) else os.path.join(".", path)
    return path if os.path.exists(path) else value


def _mapped_command(value: Any, change: Change) -> Any:
    """Change the program, and the words that name existing files."""
    try:
        words = shlex.split(value) if isinstance(value, str) else value
    except ValueError:  # unbalanced quotes, which AgentConfig refuses
        return value
    if not isinstance(words, list | tuple) or not words:
        return value
    first, *others = map(str, words)
    changed = [_mapped(first, PathKind.PROGRAM, change)]
    for word in others:
        path = change(word)
        changed.append(path if os.path.isfile(path) else word)
    return value if changed == [first, *others] else changed
