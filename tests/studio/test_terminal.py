"""Tests that terminal output fits the width and holds no control characters."""

import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType
from view_records import TOKENIZER, call, conversation, rollout, tool

from lightning_jax.studio.build import view_rollout, view_run
from lightning_jax.studio.records import CallCredit, RolloutView, SpanView, StepCredit
from lightning_jax.studio.terminal import _bar, render_rollout, render_run
from lightning_jax.traces.trajectories import TraceReader
from lightning_jax.types import Rollout, Span


def _printed(shown: RenderableType, width: int, *, color: bool = False) -> str:
    out = io.StringIO()
    system = "truecolor" if color else None
    Console(file=out, width=width, color_system=system, force_terminal=color).print(shown)
    return out.getvalue()


def _view(
    spans: list[Span], credit: StepCredit | None = None, of: Rollout | None = None
) -> RolloutView:
    transitions, _, _ = TraceReader().transitions(spans)
    shown = of or rollout(0, 1.0)
    return view_rollout(shown, spans, transitions, TOKENIZER, credit or StepCredit())


def test_a_rollout_is_shown_whole() -> None:
    spans = [*conversation(), tool("u", "q", "", at=3.5, error="no such table")]
    text = _printed(
        render_rollout(_view(spans, StepCredit({"b": CallCredit(1.0, -0.5)})), 100), 100
    )
    for part in (
        "train-00003-000-00-1  scored  reward 1  2 calls  4.50 s",
        "Capital of France?",
        "...Capital of France?search<|im_end|>",
        "It says:",
        "Paris<|im_end|>",
        '{"query": "France"}',
        "a country",
        "35 + 6 tokens  finish stop  log-prob -0.350 a token  weights 3  credit 1  advantage -0.5",
        "no such table",
    ):
        assert part in text, part
    bars = [line.count("█") for line in text.splitlines() if "█" in line]
    assert bars == [29, 7, 7, 7, 7]  # of 33 cells for 4.5 s: 4 s and four times 1 s


@pytest.mark.parametrize("width", [60, 200])
def test_lines_fit_the_terminal(width: int) -> None:
    spans = [*conversation(answer="日本" * 200), tool("u", "x" * 500, "long\n" * 50, at=3)]
    view = _view(spans)
    run = view_run("run", [view.rollout] * 9, [(view.rollout, spans)])
    for shown in (render_rollout(view, width), render_run(run, width)):
        lines = _printed(shown, width).splitlines()
        assert max(map(cell_len, lines)) <= width
    table = _printed(render_run(run, width), width)
    assert view.rollout.rollout_id in table and re.search(r"\b8\b.*\b9\b", table)
    assert ("phase" in table.splitlines()[0]) == (width == 200)


def test_failed_rollouts_are_red_and_say_why() -> None:
    failed = rollout(0, status="agent_failure", reason="deadline", detail="longer than 1 s")
    text = _printed(render_rollout(_view([], of=failed), 80), 80, color=True)
    assert "\x1b[31mdeadline: longer than 1 s\x1b[0m" in text
    run = view_run("run", [failed], [(failed, [])])
    of = "train-00003-000-00-1"
    assert re.search(rf"1 .*deadline.* {of}: longer than 1 s", _printed(render_run(run, 80), 80))
    lines = _printed(render_run(run, 60), 60).splitlines()
    assert [line.split()[0] for line in lines[1:4]] == [failed.rollout_id, "task_0", "deadline"]


def test_megabytes_and_escape_sequences_are_tamed() -> None:
    hostile = "\x1b]0;owned\x07\x1b[2J[bold red]not markup[/bold red]"
    spans = [
        call("a", hostile, hostile),
        tool("t", hostile, "\x00\x01binary\xff" * 500_000),
        tool("u", "", "", name=hostile, error=hostile),
    ]
    strange = rollout(0, status="agent_failure", reason=hostile, detail=hostile)
    task = {hostile: "\x1b[2J" * 500_000}
    view = view_rollout(strange, spans, (), TOKENIZER, StepCredit(), task)
    run = view_run(hostile, [strange], [(strange, spans)], {strange.rollout_id: task})
    text = _printed(render_rollout(view, 80), 80) + _printed(render_run(run, 80), 80)
    assert len(text) < 20_000
    assert "4,498,000" in text
    assert not any((ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160 for c in text)
    assert "[bold red]not markup[/bold red]" in text


@pytest.mark.parametrize(
    ("start_s", "duration_s", "whole_s", "bar"),
    [
        (2.0, 2.0, 8.0, "  ██"),
        (0.0, 8.0, 8.0, "████████"),
        (3.0, 0.0, 8.0, "   █"),
        (8.0, 0.0, 8.0, "       █"),
        (0.0, 0.0, 0.0, "█"),
    ],
)
def test_bars_have_at_least_one_cell_and_stay_inside(
    start_s: float, duration_s: float, whole_s: float, bar: str
) -> None:
    span = SpanView("other", "x", 0, start_s, duration_s, None, None, "", "", ())
    assert _bar(span, whole_s, 8) == bar


def test_what_is_not_shown_is_counted() -> None:
    view = _view([tool(str(i), "in", "out", at=i) for i in range(230)])
    assert re.search(r"\b30\b.*\b230\b", _printed(render_rollout(view, 80), 80))
