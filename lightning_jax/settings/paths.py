"""Paths in settings: relative to the file that holds them, and absolute in a saved file."""

import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from lightning_jax.settings.schema import PathKind, from_plain, path_kind, plain, sections

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


def named_paths(node: dict[str, Any], section: type) -> Iterator[tuple[str, PathKind, Any, Any]]:
    """Yield each setting that names a file: its key, its kind, and where it lies in `node`.

    A list of names yields each of them.
    """
    for path, inner, values in sections(section, node):
        for name, kind in ((field.name, path_kind(field.type)) for field in fields(inner)):
            key, value = ".".join((*path, name)), values.get(name)
            if kind and kind is not PathKind.COMMAND and isinstance(value, list):
                yield from ((f"{key}[{i}]", kind, value, i) for i in range(len(value)))
            elif kind and value is not None:
                yield key, kind, values, name


def named_files(section: Any) -> Iterator[tuple[str, PathKind, Any]]:
    """Yield the key, kind and value of each setting of a section that names a file."""
    node = plain(section, is_whole=True)
    for key, kind, values, name in named_paths(node, type(section)):
        yield key, kind, values[name]


def map_paths(node: dict[str, Any], section: type, change: Change) -> dict[str, Any]:
    """Change the paths in a section's plain settings. Names that are no paths stay."""
    for _, kind, values, name in named_paths(node, section):
        values[name] = _mapped(values[name], kind, change)
    return node


def absolute_paths(section: Section) -> Section:
    """Return a section whose paths lead to the same files from any working directory."""
    values = map_paths(plain(section, is_whole=True), type(section), os.path.abspath)
    return from_plain(type(section), values)


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
    if kind.is_reference:
        file = file_of(value)
        return value if file is None else change(file) + value[len(file) :]
    if kind is PathKind.PROGRAM:
        return change(value) if "/" in value else value
    path = change(value)
    if value.startswith((".", "/")):
        return path if path.startswith((".", "/")) else os.path.join(".", path)
    return path if os.path.exists(path) else value  # which may be the name of a model


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
