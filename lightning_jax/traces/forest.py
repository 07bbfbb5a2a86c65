"""Queries about many spans of one tree, answered together in O(n log n).

Agents send the spans, so a tree may be one long chain, and parents may form cycles. The members of
a cycle are all ancestors of each other and count as one node.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from lightning_jax.types import Span


class Forest:
    """Spans by their parents. If several spans share an id, the last one counts."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._index = {span.span_id: index for index, span in enumerate(spans)}
        by_id = {span.span_id: span for span in spans}
        parents = [self._index.get(by_id[s.span_id].parent_span_id or "", -1) for s in spans]
        self._node, in_circle = _without_circles(parents)
        self._parent = [-1] * len(spans)  # parent of each node
        for index, parent in enumerate(parents):
            if index not in in_circle and parent not in (-1, index):
                self._parent[self._node[index]] = self._node[parent]
        self._in_circle = in_circle
        self._enter, self._leave = _tour(self._parent)

    def latest(self, calls: Sequence[Span], tools: Sequence[Span]) -> list[Span | None]:
        """Return for each tool the last call that had ended when the tool began, or None.

        Search below the nearest ancestor of the tool that has such a call below it. If no ancestor
        has one, search all calls.
        """
        calls = sorted(calls, key=lambda call: call.end_ns)
        ends = [call.end_ns for call in calls]
        num_ended = [bisect_right(ends, tool.start_ns) for tool in tools]
        tops = self._nearest_with_call(calls, tools, num_ended)
        latest = _LatestInRange(len(self._parent))
        callers: list[Span | None] = [None] * len(tools)
        num_added = 0
        for tool in sorted(range(len(tools)), key=num_ended.__getitem__):
            for rank in range(num_added, num_ended[tool]):
                latest.put(self._enter[self._node_of(calls[rank])], rank)
            num_added = num_ended[tool]
            rank, top = num_added - 1, tops[tool]
            if top >= 0:
                rank = latest.among(self._enter[top], self._leave[top])
            callers[tool] = calls[rank] if rank >= 0 else None
        return callers

    def _nearest_with_call(
        self, calls: Sequence[Span], tools: Sequence[Span], num_ended: Sequence[int]
    ) -> list[int]:
        """Return the nearest ancestor of each tool with one of the tool's `num_ended` first calls,
        or -1.
        """
        size = len(self._parent)
        earliest = [len(calls)] * size  # first call at or below each node
        for rank in reversed(range(len(calls))):
            earliest[self._node_of(calls[rank])] = rank
        order = sorted(range(size), key=self._enter.__getitem__)
        for node in reversed(order):
            if self._parent[node] >= 0:
                above = self._parent[node]
                earliest[above] = min(earliest[above], earliest[node])
        tools_above: dict[int, list[int]] = {}
        for index, tool in enumerate(tools):
            tools_above.setdefault(self._above(tool), []).append(index)
        tops = [-1] * len(tools)
        path: list[int] = []  # from a root to the current node; the earliest call only gets later
        ranks: list[int] = []
        for node in order:
            while path and self._leave[path[-1]] <= self._enter[node]:
                path.pop()
                ranks.pop()
            path.append(node)
            ranks.append(earliest[node])
            for index in tools_above.get(node, ()):
                deepest = bisect_left(ranks, num_ended[index]) - 1
                tops[index] = path[deepest] if deepest >= 0 else -1
        return tops

    def _node_of(self, span: Span) -> int:
        return self._node[self._index[span.span_id]]

    def _above(self, span: Span) -> int:
        index = self._index[span.span_id]
        node = self._node[index]
        return node if index in self._in_circle else self._parent[node]


def _without_circles(parents: Sequence[int]) -> tuple[list[int], set[int]]:
    """Return the node of each span index, with one node for each cycle, and the indices in cycles.

    A span that is its own parent is not in a cycle, but a root.
    """
    node, in_circle = list(range(len(parents))), set[int]()
    walk_of = [-1] * len(parents)
    for first in range(len(parents)):
        at = first
        while at >= 0 and walk_of[at] < 0:
            walk_of[at] = first
            at = parents[at]
        if at >= 0 and walk_of[at] == first and parents[at] != at:  # this walk closed a cycle
            circle, member = at, parents[at]
            in_circle.add(circle)
            while member != circle:
                node[member] = circle
                in_circle.add(member)
                member = parents[member]
    return node, in_circle


def _tour(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the start and end of each node's subtree in depth-first order."""
    children: list[list[int]] = [[] for _ in parents]
    roots = []
    for node, parent in enumerate(parents):
        (children[parent] if parent >= 0 else roots).append(node)
    enter, leave, clock = [0] * len(parents), [0] * len(parents), 0
    for root in roots:
        rest = [root]
        while rest:
            node = rest.pop()
            if node < 0:
                leave[~node] = clock
                continue
            enter[node], clock = clock, clock + 1
            rest += [~node, *children[node]]
    return enter, leave


class _LatestInRange:
    """Segment tree with a number at each index, for the largest number in a range of indices."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._largest = [-1] * (2 * size)

    def put(self, index: int, number: int) -> None:
        at = index + self._size
        while at:
            self._largest[at] = max(self._largest[at], number)
            at //= 2

    def among(self, begin: int, end: int) -> int:
        """Return the largest number at indices `begin` to `end` - 1, or -1 if there is none."""
        largest, low, high = -1, begin + self._size, end + self._size
        while low < high:
            if low % 2:
                largest = max(largest, self._largest[low])
                low += 1
            if high % 2:
                high -= 1
                largest = max(largest, self._largest[high])
            low, high = low // 2, high // 2
        return largest
