"""Tables as terminal text and as Markdown. Pure functions."""

from collections.abc import Collection
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

GAP = 2  # cells between columns


@dataclass(frozen=True)
class Column:
    name: str
    is_number: bool = False
    can_drop: bool = False  # in a narrow terminal


@dataclass(frozen=True)
class Grid:
    """Table with a title above and notes below. Its text is safe to print."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()


def columns(
    *names: str, numbers: Collection[str] = (), can_drop: Collection[str] = ()
) -> tuple[Column, ...]:
    """Return columns of these names. Those in `numbers` are aligned to the right."""
    return tuple(Column(name, name in numbers, name in can_drop) for name in names)


def as_terminal(grid: Grid, width: int) -> RenderableType:
    """Render a table for a terminal. Long texts are folded, numbers are not.

    If the table is too wide, columns that can be dropped are, the last one first, with a note.
    """
    widths = [
        max(map(len, (column.name, *(row[index] for row in grid.rows))))
        for index, column in enumerate(grid.columns)
    ]
    kept = list(range(len(grid.columns)))
    can_drop = [index for index in kept if grid.columns[index].can_drop]
    while can_drop and sum(widths[index] + GAP for index in kept) - GAP > width:
        kept.remove(can_drop.pop())
    table = Table(box=None, pad_edge=False, header_style="bold", expand=False)
    for column in (grid.columns[index] for index in kept):
        justify = "right" if column.is_number else "left"
        name = Text(column.name)
        table.add_column(name, justify=justify, no_wrap=column.is_number, overflow="fold")
    for row in grid.rows:
        table.add_row(*(Text(row[index]) for index in kept))
    parts: list[RenderableType] = [Text(grid.title, style="bold underline")] * bool(grid.title)
    parts += [table] * bool(grid.rows)
    dropped = [column.name for i, column in enumerate(grid.columns) if i not in kept]
    notes = [*grid.notes, *[f"in a wider terminal: {', '.join(dropped)}"] * bool(dropped)]
    return Group(*parts, *(Text(note, style="dim") for note in notes))


def as_markdown(grid: Grid) -> str:
    """Render a table for GitHub, with a heading."""
    parts = [f"### {_escaped(grid.title)}"] * bool(grid.title)
    if grid.rows:
        lines = [
            [_escaped(column.name) for column in grid.columns],
            ["---:" if column.is_number else "---" for column in grid.columns],
            *([_escaped(cell) for cell in row] for row in grid.rows),
        ]
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    if grid.notes:
        parts.append("\n".join(f"* {_escaped(note)}" for note in grid.notes))
    return "\n\n".join(parts)


def _escaped(text: str) -> str:
    """Return the text on one line, with characters that Markdown or HTML would read escaped."""
    for sign in "\\`*_[]<>|#":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.replace("&", "&amp;").split())
