"""Signs of a run that does not learn, and what to do: `lightning-jax help troubleshooting`."""

import re
import textwrap
from pathlib import Path

import yaml

FILE = Path(__file__).with_suffix(".yaml")  # docs/reference.py writes a page from it, too
WIDTH = 80
LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")


def as_text() -> str:
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
