"""Which page holds the keys and values of which token ids: a radix tree. Host side, no JAX.

A path from the root spells token ids, PAGE of them to a node, and a node owns one page. Leaves may
hold fewer; such a page fills up when a longer sequence comes along its path. Matching is by token,
not by page: of a page whose first tokens agree, just those are used.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

PAGE = 16  # tokens


@dataclass(eq=False)  # one is another only if it is the same node
class Node:
    """One page. No child's tokens begin another child's, and only a full page has children."""

    parent: "Node | None"
    page: int  # -1: the root's
    tokens: tuple[int, ...] = ()
    children: dict[tuple[int, ...], "Node"] = field(default_factory=dict)
    pins: int = 0


@dataclass(frozen=True)
class Match:
    """The first `length` tokens lie in `pages`, of the last one perhaps only the beginning."""

    length: int
    pages: tuple[int, ...]
    node: Node  # the last page's; the root if there is none


@dataclass(frozen=True)
class Insertion:
    """Blocks `first`, `first + 1`, ... of the sequence, PAGE tokens each, belong into `pages`."""

    first: int
    pages: tuple[int, ...]


class PageTree:
    """Pages 0..num_pages-1, written by one version of the weights.

    A page is free or owned by one node. For room, the leaf that was not used for longest is
    evicted; a pinned one stays. Each adapter has a root of its own: what one computed, no other may
    read. None is that of a model without several.
    """

    def __init__(self, num_pages: int, version: int) -> None:
        self.version = version
        self.num_evicted = 0  # pages, since the start
        self._num_pages = num_pages
        self._clock = 0
        self._clear()

    def _clear(self) -> None:
        self._roots: dict[int | None, Node] = {}
        self._free = list(range(self._num_pages))[::-1]
        self._nodes: list[Node | None] = [None] * self._num_pages
        self._last_used = np.zeros(self._num_pages, np.int64)
        self._evictable = np.zeros(self._num_pages, bool)

    @property
    def num_used(self) -> int:
        """How many pages hold something."""
        return self._num_pages - len(self._free)

    def reset(self, version: int) -> None:
        """New weights: nothing is cached any more. Pins of before may still be taken off."""
        self.version = version
        self._clear()

    def match(self, ids: Sequence[int], adapter: int | None = None) -> Match:
        """The longest beginning of `ids` that is cached; its pages count as used now."""
        ids = tuple(ids)
        self._clock += 1
        node, pages, length = self._root(adapter), [], 0
        while child := node.children.get(ids[length : length + PAGE]):
            node, length = self._touch(child), length + len(child.tokens)
            pages.append(node.page)
        rest = ids[length : length + PAGE]
        shared = {child: num_shared(child.tokens, rest) for child in node.children.values()}
        best = max(shared, key=shared.__getitem__, default=None)
        if best and shared[best]:
            node, length = self._touch(best), length + shared[best]
            pages.append(node.page)
        return Match(length, tuple(pages), node)

    def insert(self, ids: Sequence[int], version: int, adapter: int | None = None) -> Insertion:
        """Gives pages to what of `ids` is not cached, as far as there is room; all count as used.

        The caller fills them before it does anything else here. `version` is of the weights that
        computed all of `ids`; unless it is the tree's, nothing is given.
        """
        if version != self.version:
            return Insertion(0, ())
        ids = tuple(ids)
        self._clock += 1
        node, known, pages = self._root(adapter), 0, []
        for start in range(0, len(ids), PAGE):
            child, is_cached = self._child(node, ids[start : start + PAGE])
            if child is None:
                break
            node = self._touch(child)
            if is_cached:
                known += 1
            else:
                pages.append(node.page)
        return Insertion(known, tuple(pages))

    def pin(self, node: Node) -> None:
        """Keeps the node's page and those before it, until `unpin`."""
        node.pins += 1
        self._update(node)

    def unpin(self, node: Node) -> None:
        """Takes one pin off."""
        assert node.pins > 0, "a pin is taken off once"
        node.pins -= 1
        self._update(node)

    def _root(self, adapter: int | None) -> Node:
        return self._roots.setdefault(adapter, Node(None, -1))

    def _child(self, node: Node, tokens: tuple[int, ...]) -> tuple[Node | None, bool]:
        """The child that holds `tokens`, made if need be, and whether its page does; None: no room.

        With children (1 2 3) and (5 6): 1 2 is cached, 5 6 7 lengthens the second, 1 9 is new.
        """
        if child := node.children.get(tokens):
            return child, True
        for child in node.children.values():
            shared = num_shared(child.tokens, tokens)
            if shared == len(tokens):
                return child, True
            if shared == len(child.tokens):
                del node.children[child.tokens]
                child.tokens = tokens
                node.children[tokens] = child
                return child, False
        return self._new_child(node, tokens), False

    def _new_child(self, node: Node, tokens: tuple[int, ...]) -> Node | None:
        self.pin(node)  # making room must not take away the path itself
        if not self._free and self._evictable.any():
            never = np.iinfo(np.int64).max
            self._evict(int(np.where(self._evictable, self._last_used, never).argmin()))
        child = None
        if self._free:
            child = Node(node, self._free.pop(), tokens)
            node.children[tokens] = self._nodes[child.page] = child
            self._update(child)
        self.unpin(node)
        return child

    def _evict(self, page: int) -> None:
        node = self._nodes[page]
        assert node is not None and node.parent is not None, "only an owned page is evicted"
        del node.parent.children[node.tokens]
        self._nodes[page] = None
        self._evictable[page] = False
        self._free.append(page)
        self._update(node.parent)
        self.num_evicted += 1

    def _touch(self, node: Node) -> Node:
        self._last_used[node.page] = self._clock
        return node

    def _update(self, node: Node) -> None:
        # The root has no page, and a node of before a reset has none any more.
        if node.page >= 0 and self._nodes[node.page] is node:
            self._evictable[node.page] = not node.children and node.pins == 0


def num_shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Length of the common beginning."""
    differs = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differs, min(len(a), len(b)))
