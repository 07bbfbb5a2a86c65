"""Reference of all settings, made from the sections and the texts below their fields."""

import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

from lightning_jax.settings.errors import similar_keys
from lightning_jax.settings.schema import all_defaults, describe, has_names, inner_section, sections
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
    meaning: str

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
    return [
        SectionReference(
            key, inspect.cleandoc(section.__doc__ or ""), tuple(_settings(key, section, values))
        )
        for key, section, values in sections(Config, all_defaults(Config))
        if key[:2] != ("serve", "mesh")  # described as `mesh`
    ]


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
    if matches := by_key + by_meaning:
        return matches
    similar = similar_keys("_".join(words), Config)
    return [setting for setting in settings if ".".join(setting.key) in similar]


def as_entry(setting: Setting) -> str:
    """Format a setting by itself: its whole key and default, then its meaning, indented."""
    whole = replace(setting, key=(".".join(setting.key),))
    values = f"  [{setting.values}]" if setting.values else ""
    meaning = textwrap.indent(textwrap.fill(setting.meaning, WIDTH - 4), "    ")
    return f"{whole.text}{values}\n{meaning}"


def _settings(key: tuple[str, ...], section: Any, values: dict[str, Any]) -> Iterator[Setting]:
    """Yield the settings of a section. One that may be a section, such as a judge, is None."""
    for field in fields(section):
        inner = inner_section(field.type)
        if inner and (has_names(field.type) or field.default is not None):
            continue
        allowed = describe(field.type)
        units = [UNITS[part] for part in field.name.split("_") if part in UNITS]
        of_classes = (vars(c).get("__pydantic_fields__", {}) for c in section.__mro__)
        described = [of[field.name].description for of in of_classes if field.name in of]
        yield Setting(
            (*key, field.name),
            None if inner else values[field.name],
            ", ".join(units + [allowed] * (allowed not in ("", "none"))),
            " ".join("".join(filter(None, described)).split()),
        )


def _as_markdown(section: SectionReference) -> str:
    key = section.key
    lines = ["  " * depth + f"{name}:" for depth, name in enumerate(key)]
    for setting in section.settings:
        lines += textwrap.indent("\n".join(_as_yaml(setting)), "  " * len(key)).splitlines()
    heading = f"## `{'.'.join(key)}`" if key else ""
    block = "\n".join(("```yaml", *lines, "```"))
    return "\n\n".join(filter(None, (heading, section.description, block))) + "\n"


def _as_yaml(setting: Setting) -> Iterator[str]:
    """Yield a setting's text, with its meaning and values beside it if they fit, else above."""
    meaning, values = [setting.meaning] * bool(setting.meaning), [f"[{setting.values}]"]
    values = values if setting.values else []
    width, above, line = WIDTH - 2 * (len(setting.key) - 1), meaning + values, setting.text
    for rest, beside in (([], meaning + values), (meaning, values)):
        if beside and len(text := f"{setting.text}  # {' '.join(beside)}") <= width:
            above, line = rest, text
            break
    yield from textwrap.wrap(
        " ".join(above), width, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )
    yield line
