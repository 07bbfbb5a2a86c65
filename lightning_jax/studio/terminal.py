"""Rendering of views and tables as terminal text with rich, and as Markdown. Pure functions.

Text from a model, a tool or a task is put into `Text`, which parses no markup.
"""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from lightning_jax.studio import DEFAULT_CHARS
from lightning_jax.studio.records import CallView, Grid, RolloutView, RunView, SpanView, cut

GAP = 2  # cells between columns
FOLDED = 12  # cells that a folded text needs at least
MAX_LISTED = 8  # rows whose dropped numbers are listed below a table
MAX_SPANS = 200  # lines in a waterfall
# Terminal width from which phase, step, task and reason have their own columns. In narrower ones,
# task and reason are below the id, and phase and step are omitted: the id contains them.
WIDE = 100
STYLES = {"agent": "magenta", "llm": "cyan", "tool": "yellow", "reward": "green", "other": ""}
STATUS_STYLES = {
    "scored": "green",
    "agent_failure": "red",
    "infrastructure_failure": "red",
    "stopped": "yellow",
}


def render_run(view: RunView, width: int) -> RenderableType:
    """Render the table of rollouts, the number left out, and the failures by reason.

    In a narrow terminal a rollout's task and reason are below its id.
    """
    wide = width >= WIDE
    table = Table(box=None, pad_edge=False, header_style="bold", expand=False)
    longest = max((len(row.rollout.rollout_id) for row in view.rows), default=0)
    table.add_column("rollout", overflow="fold", min_width=min(longest, 24))
    for name in ("phase", "step", "task") if wide else ():
        table.add_column(name, overflow="fold")
    table.add_column("status")
    for name in ("reward", "calls", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    if wide:
        table.add_column("reason", overflow="fold")
    for row in view.rows:
        rollout = row.rollout
        name, reason = _text(rollout.rollout_id), _text(rollout.reason or "", "red")
        reward = "" if rollout.reward is None else f"{rollout.reward:g}"
        numbers = _text(reward), _text(row.num_calls), _text(f"{row.seconds or 0:.2f}")
        if wide:
            which = (name, *map(_text, (rollout.phase, rollout.step, row.task_name)))
            table.add_row(*which, _status(rollout.status), *numbers, reason)
        else:
            lines = [name, _text(row.task_name, "dim")] + [reason] * bool(rollout.reason)
            table.add_row(Text("\n").join(lines), _status(rollout.status), *numbers)
    return Group(table, "", *_below(view))


def _below(view: RunView) -> Iterator[Text]:
    if view.num_left_out:
        of = f"{view.num_left_out} of {view.num_left_out + len(view.rows)} rollouts"
        yield _text(f"not shown: {of}; select with --phase, --step and --limit")
    counts = ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in sorted(view.counts.items()))
    yield _text(f"in all: {counts}")
    for failure in view.failures:
        status = failure.status.replace("_", " ")
        detail = failure.detail and f": {failure.detail}"
        yield _text(
            f"{failure.count} {status}: {failure.reason}, such as {failure.example}{detail}", "red"
        )


def render_rollout(view: RolloutView, width: int, chars: int = DEFAULT_CHARS) -> RenderableType:
    """Render the waterfall, then each call, tool run and error.

    Texts are cut to `chars` characters, or not at all if it is 0.
    """
    parts: list[RenderableType] = [*_head(view, chars), "", _waterfall(view, width)]
    if (num_left_out := len(view.spans) - MAX_SPANS) > 0:
        parts.append(_text(f"not shown: {num_left_out} of {len(view.spans)} spans", "bold"))
    for span in view.spans[:MAX_SPANS]:
        parts += _details(span, chars)
    return Group(*parts)


def _head(view: RolloutView, chars: int) -> Iterator[RenderableType]:
    rollout = view.rollout
    line = Text.assemble((rollout.rollout_id, "bold"), "  ", _status(rollout.status))
    if rollout.reward is not None:
        line.append(f"  reward {rollout.reward:g}")
    line.append(f"  {len(view.calls)} calls  {view.duration_s:.2f} s")
    yield line
    where = f"  worker {rollout.worker}" if rollout.worker else ""
    yield _text(f"task {rollout.task_id}  {rollout.phase} step {rollout.step}{where}")
    for name, text in view.task:
        yield Padding(Text.assemble((f"{name}: ", "dim"), cut(text, chars)), (0, 0, 0, 2))
    for title, numbers in (
        ("the agent returned", rollout.metrics),
        ("rewards", rollout.components),
    ):
        if numbers:
            yield _text("  ".join((title, *(f"{name} {x:g}" for name, x in numbers.items()))))
    for name, text in view.reasons:
        yield Padding(Text.assemble((f"{name}: ", "dim"), cut(text, chars)), (0, 0, 0, 2))
    if rollout.reason is not None:
        yield _text(f"{rollout.reason}: {rollout.detail or ''}", "red")
    for note in view.notes:
        yield _text(f"note: {note}", "yellow")


# Waterfall


def _waterfall(view: RolloutView, width: int) -> Table:
    bar_width = max(10, width // 3)
    table = Table(box=None, pad_edge=False, header_style="dim", expand=True)
    table.add_column("span", no_wrap=True, overflow="ellipsis", ratio=1)
    scale = "0" + f"{view.duration_s:.2f} s".rjust(bar_width - 1)
    table.add_column(_text(scale), no_wrap=True, width=bar_width)
    table.add_column("s", justify="right", no_wrap=True)
    for span in view.spans[:MAX_SPANS]:
        style = "red" if span.error is not None else STYLES[span.kind]
        label = "  " * min(span.depth, 8) + span.label.replace("\n", " ")
        bar = _bar(span, view.duration_s, bar_width)
        table.add_row(_text(label, style), _text(bar, style), _text(f"{span.duration_s:.3f}"))
    return table


def _bar(span: SpanView, duration_s: float, width: int) -> str:
    """Draw a bar of at least one cell that never passes the end.

    2 s of 8 s from the fourth on, in 8 cells, is `____##`, with blanks for the `_`.
    """
    cells_a_second = width / duration_s if duration_s > 0 else 0.0
    start = min(round(span.start_s * cells_a_second), width - 1)
    return " " * start + "█" * min(max(round(span.duration_s * cells_a_second), 1), width - start)


# Details of a span


def _details(span: SpanView, chars: int) -> Iterator[RenderableType]:
    """Render a call, a tool run or an error. Any other span gets nothing."""
    if not (span.call or span.kind == "tool" or span.error is not None):
        return
    yield ""
    style = "red" if span.error is not None else STYLES[span.kind]
    title = _text(span.label.replace("\n", " "), style)
    title.truncate(200, overflow="ellipsis")
    yield Rule(title, align="left", style=style)
    if span.error is not None:
        yield _text(cut(f"failed: {span.error}", chars), "bold red")
    if span.call:
        yield from _call(span.call, chars)
    else:
        for name, text in (("input", span.input), ("output", span.output)):
            if text:
                yield from _block(name, text, chars)


def _call(call: CallView, chars: int) -> Iterator[RenderableType]:
    yield _text("  ".join(call.facts), "dim")
    shared = ""
    if call.shares_with is not None:
        end = call.shared_text[-60:].replace("\n", "⏎")
        shared = f": {call.shared_size} as call {call.shares_with} ...{end}, then"
    yield from _block(f"prompt{shared}", call.new_text, chars)
    if call.response or call.tokens:
        yield from _block("response", call.response, chars)
    for name, arguments in call.tool_calls:
        yield _text(cut(f"calls {name}({arguments})", chars), "yellow")


def _block(name: str, text: str, chars: int) -> Sequence[RenderableType]:
    return _text(name, "bold"), Padding(_text(cut(text, chars)), (0, 0, 0, 2))


def _text(value: object, style: str = "") -> Text:
    return Text(str(value), style=style)


def _status(status: str) -> Text:
    return _text(status.replace("_", " "), STATUS_STYLES.get(status, "yellow"))


# Tables


def as_terminal(grid: Grid, width: int) -> RenderableType:
    """Render a table for a terminal. Long texts are folded, and no digit of a number is cut.

    If the table is too wide, columns that can be dropped are, and then other numbers, the last one
    first. Notes have their values, or their names if there are many rows.
    """
    widths = [
        max(map(len, (column.name, *(row[index] for row in grid.rows))))
        for index, column in enumerate(grid.columns)
    ]
    kept = list(range(len(grid.columns)))
    can_drop = [index for index in kept if grid.columns[index].can_drop]
    while can_drop and sum(widths[index] + GAP for index in kept) - GAP > width:
        kept.remove(can_drop.pop())
    numbers = [index for index in kept[1:] if grid.columns[index].is_number]
    needed = [
        w if c.is_number else min(w, FOLDED) for w, c in zip(widths, grid.columns, strict=True)
    ]
    while numbers and sum(needed[index] + GAP for index in kept) - GAP > width:
        kept.remove(numbers.pop())
    table = Table(box=None, pad_edge=False, header_style="bold", expand=False)
    for column in (grid.columns[index] for index in kept):
        justify = "right" if column.is_number else "left"
        name = Text(column.name)
        table.add_column(name, justify=justify, no_wrap=column.is_number, overflow="fold")
    for row in grid.rows:
        table.add_row(*(Text(row[index]) for index in kept))
    parts: list[RenderableType] = [Text(grid.title, style="bold underline")] * bool(grid.title)
    parts += [table] * bool(grid.rows)
    dropped = [(i, column.name) for i, column in enumerate(grid.columns) if i not in kept]
    notes = list(grid.notes)
    if dropped and len(grid.rows) > MAX_LISTED:
        notes.append(f"in a wider terminal: {', '.join(name for _, name in dropped)}")
    elif dropped:
        notes += [
            f"{row[0]}: {'  '.join(f'{name} {row[index]}' for index, name in dropped)}"
            for row in grid.rows
        ]
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
