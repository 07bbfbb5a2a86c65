"""Reference of all settings, made from the sections and the comments beside their fields."""

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

from lightning_jax.schema import describe, inner_section
from lightning_jax.settings.errors import similar_keys
from lightning_jax.train.config import Config

HEADER = """\
# Settings

Every setting with its default, its meaning and, in brackets, its unit and the values that it
allows. A run reads YAML files and `key=value` arguments, such as `optimizer.learning_rate=1e-5`.
`None` is `null` in YAML. This page is what `lightning-jax config` prints. `lightning-jax config
WORD` shows the settings in whose key or meaning a word occurs, and `lightning-jax config check
FILE` checks a file as `train` does before it starts.

Paths in a file are relative to that file: tasks, FILE:FUNCTION, programs, and directories of
models. Those of `key=value` are relative to the working directory, and so is `run_dir` anywhere.
"""
WIDTH = 100
UNITS = {  # by a part of a key
    "s": "seconds",
    "mib": "MiB",
    "kib": "KiB",
    "len": "tokens",
    "tokens": "tokens",
    "buckets": "tokens",
    "chunk": "tokens",
    "chars": "characters",
    "steps": "steps",
}


@dataclass(frozen=True)
class Setting:
    """Setting of the reference."""

    key: tuple[str, ...]
    default: Any  # MISSING if it is required
    values: str  # unit and range, or ""
    above: tuple[str, ...]  # comment lines above the field
    comment: str  # beside the field

    @property
    def meaning(self) -> str:
        return " ".join((*(line.lstrip("# ") for line in self.above), self.comment)).strip()

    @property
    def text(self) -> str:
        """Key and default as YAML, without the section."""
        return f"{self.key[-1]}: {'???' if self.default is MISSING else json.dumps(self.default)}"


@dataclass(frozen=True)
class SectionReference:
    """Section of the reference, without those in it."""

    key: tuple[str, ...]
    description: str
    settings: tuple[Setting, ...]


def all_sections() -> list[SectionReference]:
    """Return the reference of a run's settings, by section."""
    return list(_sections((), Config, vars(Config())))


def settings_page() -> str:
    """Return the reference as Markdown, with a block of YAML for each section."""
    return "\n".join((HEADER, *map(_as_markdown, all_sections())))


def find_settings(words: Sequence[str]) -> list[Setting]:
    """Return the settings whose key, meaning or values have all of the words, those by key first.

    A word may be the start of a longer one, such as "row" of `row_len`. If there are none, return
    the settings that someone who wrote the words may have meant.
    """
    patterns = [re.compile(rf"(?<![a-z]){re.escape(word)}", re.IGNORECASE) for word in words]
    by_key: list[Setting] = []
    by_meaning: list[Setting] = []
    settings = [setting for section in all_sections() for setting in section.settings]
    for setting in settings:
        key = ".".join(setting.key)
        if all(pattern.search(key) for pattern in patterns):
            by_key.append(setting)
        elif all(p.search(f"{key} {setting.meaning} {setting.values}") for p in patterns):
            by_meaning.append(setting)
    if found := by_key + by_meaning:
        return found
    similar = similar_keys("_".join(words), Config)
    return [setting for setting in settings if ".".join(setting.key) in similar]


def as_entry(setting: Setting) -> str:
    """Format a setting by itself: its whole key and default, then its meaning, indented."""
    whole = replace(setting, key=(".".join(setting.key),))
    values = f"  [{setting.values}]" if setting.values else ""
    meaning = textwrap.indent(textwrap.fill(setting.meaning, WIDTH - 4), "    ")
    return f"{whole.text}{values}\n{meaning}"


def _sections(
    key: tuple[str, ...], section: type, values: Mapping[str, Any]
) -> Iterator[SectionReference]:
    """Yield a section with these default values, then each section in it."""
    source = inspect.getsource(section)
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    nodes = {
        ast.unparse(node.target): node for node in tree.body if isinstance(node, ast.AnnAssign)
    }
    settings: list[Setting] = []
    below: list[SectionReference] = []
    for field in fields(section):  # pyright: ignore[reportArgumentType]
        path, value = (*key, field.name), values[field.name]
        inner = inner_section(field.type)
        if inner and inner.is_dict:
            defaults = {item.name: item.default for item in fields(inner.section)}
            below += _sections((*path, "NAME"), inner.section, defaults)
        elif inner and value is not None:
            below += _sections(path, inner.section, vars(value))
        else:
            default = None if field.default is None else value  # not one that is derived
            units = (UNITS[part] for part in field.name.split("_") if part in UNITS)
            values_text = ", ".join((*units, *filter(None, [_range(field.type)])))
            comments = _comments(nodes[field.name], source.splitlines())
            settings.append(Setting(path, default, values_text, *comments))
            if inner and "NAME" in key:  # an optional section, such as a judge
                defaults = {item.name: item.default for item in fields(inner.section)}
                below += _sections(path, inner.section, defaults)
    yield SectionReference(key, ast.get_docstring(tree) or "", tuple(settings))
    yield from below


def _range(hint: Any) -> str:
    allowed = describe(hint)
    return "" if allowed == "none" else allowed


def _comments(node: ast.AnnAssign, source: list[str]) -> tuple[tuple[str, ...], str]:
    """Return the comment lines above a field, and the comment beside it."""
    start = node.lineno - 1
    while source[start - 1].lstrip().startswith("#"):
        start -= 1
    above = tuple(line.strip() for line in source[start : node.lineno - 1])
    return above, source[node.lineno - 1].partition("  # ")[2]


def _as_markdown(section: SectionReference) -> str:
    key = section.key
    lines = ["  " * depth + f"{name}:" for depth, name in enumerate(key)]
    for setting in section.settings:
        lines += textwrap.indent("\n".join(_as_yaml(setting)), "  " * len(key)).splitlines()
    heading = f"## `{'.'.join(key)}`" if key else ""
    block = "\n".join(("```yaml", *lines, "```"))
    return "\n\n".join(filter(None, (heading, section.description, block))) + "\n"


def _as_yaml(setting: Setting) -> Iterator[str]:
    """Yield a setting's comments and its text."""
    yield from setting.above
    note = " ".join(
        filter(None, (setting.comment, f"[{setting.values}]" if setting.values else ""))
    )
    if len(line := f"{setting.text}  # {note}") > WIDTH - 4:
        yield from textwrap.wrap(note, WIDTH - 6, initial_indent="# ", subsequent_indent="# ")
        yield setting.text
    else:
        yield line if note else setting.text
