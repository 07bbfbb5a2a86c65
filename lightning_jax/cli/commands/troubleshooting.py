"""`lightning-jax help`: of a command, or signs of a run that does not learn and what to do."""

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import yaml

from lightning_jax.cli.command import Command, argument

FILE = Path(__file__).with_suffix(".yaml")  # docs/reference.py writes a page from it, too
TOPIC = "troubleshooting"
WIDTH = 80
LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")


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
