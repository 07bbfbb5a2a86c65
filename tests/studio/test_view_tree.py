"""Tests that every span is shown once, for any parent."""

from view_records import span

from lightning_jax.studio.tree import in_tree_order
from lightning_jax.types import Span


def _shape(spans: list[Span]) -> list[tuple[str, int]]:
    return [(span.span_id, depth) for span, depth in in_tree_order(spans)]


def test_parents_come_before_children_and_siblings_by_start() -> None:
    spans = [
        span("late", {}, parent="root", at=2),
        span("inner", {}, parent="early", at=1.2),
        span("early", {}, parent="root", at=1),
        span("root", {}, at=0),
    ]
    assert _shape(spans) == [("root", 0), ("early", 1), ("inner", 2), ("late", 1)]


def test_a_span_whose_parent_is_missing_hangs_at_the_root() -> None:
    spans = [
        span("a", {}),
        span("lost", {}, parent="unknown", at=1),
        span("b", {}, parent="lost", at=2),
    ]
    assert _shape(spans) == [("a", 0), ("lost", 0), ("b", 1)]


def test_circles_are_broken_at_their_first_span() -> None:
    spans = [
        span("own", {}, parent="own", at=3),
        span("x", {}, parent="y", at=1),
        span("y", {}, parent="x", at=2),
        span("below", {}, parent="y", at=4),
    ]
    assert _shape(spans) == [("own", 0), ("x", 0), ("y", 1), ("below", 2)]


def test_a_parent_is_of_the_same_trace() -> None:
    other = Span("another trace", "root", None, "n", 0, 1)
    assert _shape([other, span("child", {}, parent="root")]) == [("root", 0), ("child", 0)]


def test_depth_has_no_limit() -> None:
    spans = [span("0", {})] + [span(str(i), {}, parent=str(i - 1)) for i in range(1, 5000)]
    assert _shape(spans)[-1] == ("4999", 4999)
