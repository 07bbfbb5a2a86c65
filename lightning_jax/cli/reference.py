"""Reference of all settings, made from the sections and the comments beside their fields."""

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_args, get_origin

from lightning_jax.schema import describe
from lightning_jax.train.config import Config

HEADER = """\
# Settings

Every setting with its default, its meaning and, in brackets, the values that it allows. A run reads
YAML files and `key=value` arguments, such as `optimizer.learning_rate=1e-5`. `None` is `null` in
YAML. This page is what `lightning-jax settings` prints.
"""
WIDTH = 100


def settings_page() -> str:
    """Return the reference as Markdown, with a block of YAML for each section."""
    return "\n".join((HEADER, *_sections((), Config, vars(Config()))))


def _sections(key: tuple[str, ...], section: Any, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the text of a section with these default values, then of each section in it."""
    source = inspect.getsource(section)
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    nodes = {
        ast.unparse(node.target): node for node in tree.body if isinstance(node, ast.AnnAssign)
    }
    lines, below = ["  " * depth + f"{name}:" for depth, name in enumerate(key)], []
    for field in fields(section):
        name, value = field.name, values[field.name]
        inner = get_args(field.type)[-1:] if get_origin(field.type) is dict else ()
        if is_dataclass(value):
            below += _sections((*key, name), type(value), vars(value))
        elif inner and is_dataclass(inner[0]):
            defaults = {item.name: item.default for item in fields(inner[0])}
            below += _sections((*key, name, "NAME"), inner[0], defaults)
        else:
            text = f"{name}: {'???' if value is MISSING else json.dumps(value)}"
            found = _setting(text, describe(field.type), nodes[name], source.splitlines())
            lines += textwrap.indent("\n".join(found), "  " * len(key)).splitlines()
    heading = f"## `{'.'.join(key)}`" if key else ""
    block = "\n".join(("```yaml", *lines, "```"))
    yield "\n\n".join(filter(None, (heading, ast.get_docstring(tree), block))) + "\n"
    yield from below


def _setting(text: str, allowed: str, node: ast.AnnAssign, source: list[str]) -> Iterator[str]:
    """Yield a setting's comments and its text."""
    start = node.lineno - 1
    while source[start - 1].lstrip().startswith("#"):
        start -= 1
    yield from (line.strip() for line in source[start : node.lineno - 1])
    comment = source[node.lineno - 1].partition("  # ")[2]
    note = " ".join(filter(None, (comment, f"[{allowed}]" if allowed not in ("", "none") else "")))
    if len(line := f"{text}  # {note}") > WIDTH - 4:
        yield from textwrap.wrap(note, WIDTH - 6, initial_indent="# ", subsequent_indent="# ")
        yield text
    else:
        yield line if note else text
