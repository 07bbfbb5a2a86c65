"""`lightning-jax config` and `help`: settings, commands and advice to read.

Nothing heavy is imported before a command runs.
"""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import yaml

from lightning_jax.cli.command import Command, argument
from lightning_jax.errors import UserError

if TYPE_CHECKING:
    from lightning_jax.settings.schema import Section

# docs/reference.py writes a page from it, too.
FILE = Path(__file__).with_name("troubleshooting.yaml")
TOPIC = "troubleshooting"
WIDTH = 80
LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")


@dataclass(frozen=True, kw_only=True)
class ShowConfig(Command):
    """Print every setting of a run with its default, meaning, unit and the values that it allows.

    With a WORD, print the settings in whose key or meaning it occurs. `check FILE [key=value ...]`
    checks a file as `train` does before it starts, and prints the values that it derives.
    """

    needs_jax: ClassVar[bool] = False
    words: list[str] = argument(
        "WORD", "words to search for, or: check FILE [key=value ...]", default_factory=list
    )

    def run(self) -> int:
        words = self.words
        if words[:1] == ["check"]:
            if not words[1:]:
                raise UserError.missing("FILE", "check needs a FILE; pass a config.")
            _check(words[1:])
            return 0
        from lightning_jax.cli.reference import as_entry, find_settings, settings_page

        if not words:
            print(settings_page(), end="")
            return 0
        matches = find_settings(words)
        if not matches:
            raise UserError(
                f"no setting's key or meaning has {' and '.join(map(repr, words))}; "
                "lightning-jax config lists all.",
                reason="not_found",
            )
        print("\n".join(map(as_entry, matches)))
        return 0


def _check(argv: list[str]) -> None:
    """Check settings as `train` does before it starts, and print what follows from them.

    Tasks in files are read. A loader is not called, because it may take long.
    """
    from lightning_jax.settings import changed_keys, load_with_derived
    from lightning_jax.train.config import Config
    from lightning_jax.train.directory import SETTINGS
    from lightning_jax.train.loop.check import check_start
    from lightning_jax.train.state.resume import HARMLESS

    config, derived = load_with_derived(Config, argv)
    check_start(config)
    if config.data.load is None:
        from lightning_jax.train.tasks.data import load_tasks

        load_tasks(config)  # logs how many there are
    print(f"a run can start: {' '.join(argv)}")
    _print_all("derived from other settings", derived)
    _print_all("files", dict(_files(config)))
    saved = Path(config.run_dir) / SETTINGS
    if saved.exists():
        changed = [k for k in changed_keys(saved, config) if not k.startswith(HARMLESS)]
        print(f"resumes {config.run_dir}; changed since then: {', '.join(changed) or 'nothing'}")
    else:
        print(f"begins {config.run_dir}")


def _files(config: "Section") -> Iterator[tuple[str, Any]]:
    """Yield the settings that name files, and not a known function or model."""
    from lightning_jax.settings.paths import named_files
    from lightning_jax.settings.schema import PathKind

    for key, kind, value in named_files(config):
        is_known = kind.is_reference and ":" not in str(value)
        if not is_known and key != "model.name":
            yield key, " ".join(value) if kind is PathKind.COMMAND else value


def _print_all(title: str, settings: dict[str, Any]) -> None:
    print(f"{title}:")
    for key, value in settings.items():
        print(f"  {key}={list(value) if isinstance(value, tuple) else value}")


@dataclass(frozen=True, kw_only=True)
class Help(Command):
    """Show the help of a command, or with `troubleshooting` what to do if a run does not learn."""

    needs_jax: ClassVar[bool] = False
    topic: str | None = argument(
        "TOPIC", f"a command, or: {TOPIC} (default: the list of commands)", default=None
    )

    def run(self) -> int:
        if self.topic == TOPIC:
            print(_page())
            return 0
        from lightning_jax.cli.main import main

        return main([self.topic, "--help"] if self.topic else ["--help"])


def _page() -> str:
    """Return the page for a terminal: under each sign its meaning and what to do."""
    page = yaml.safe_load(FILE.read_text())
    parts = [page["title"], page["introduction"]]
    for title, rows in page["sections"].items():
        parts += [title.upper(), *map(_entry, rows)]
    return "\n\n".join(parts)


def _entry(row: dict[str, str]) -> str:
    """Return a row as three paragraphs, without the marks of Markdown."""
    sign, meaning, cure = (LINK.sub(r"\1", text).replace("`", "") for text in row.values())
    lines = [textwrap.fill(sign, WIDTH, subsequent_indent="  ")]
    for mark, text in (("    ", meaning), ("  > ", cure)):
        lines.append(textwrap.fill(text, WIDTH, initial_indent=mark, subsequent_indent="    "))
    return "\n".join(lines)
