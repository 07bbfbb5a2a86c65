"""Tree order of a rollout's spans. Pure functions."""

from collections import defaultdict
from collections.abc import Sequence

from lightning_jax.types import Span


def in_tree_order(spans: Sequence[Span]) -> list[tuple[Span, int]]:
    """Return (span, depth) pairs, parents before children and siblings by start time.

    A span goes to the root if its parent is missing or is below the span itself. Each span comes
    once.
    """
    by_id = {(span.trace_id, span.span_id): span for span in spans}
    children: defaultdict[tuple[str, str] | None, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        parent = (span.trace_id, span.parent_span_id or "")
        is_there = parent in by_id and span.parent_span_id != span.span_id
        children[parent if is_there else None].append(span)
    found: dict[tuple[str, str], tuple[Span, int]] = {}
    roots = children[None]
    while True:
        waiting = [(span, 0) for span in reversed(roots)]
        while waiting:  # not recursive: agents may nest spans to any depth
            span, depth = waiting.pop()
            key = (span.trace_id, span.span_id)
            if key not in found:
                found[key] = (span, depth)
                waiting += [(child, depth + 1) for child in reversed(children[key])]
        circles = [span for key, span in by_id.items() if key not in found]
        if not circles:
            return list(found.values())
        roots = [min(circles, key=lambda span: span.start_ns)]
