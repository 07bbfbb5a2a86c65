"""Radix tree from token ids to the pages with their keys and values. Host side, no JAX.

A path from the root spells token ids, up to PAGE per node, and each node owns one page. A leaf may
hold fewer than PAGE tokens, and it fills up when a longer sequence follows its path. Matching is by
token, not by page: if only the first tokens of a page agree, only those are used.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

PAGE = 16  # tokens


@dataclass(eq=False)  # compare by identity
class Node:
    """One page.

    No child's tokens are a prefix of another child's. Only a full page has children.
    """

    parent: "Node | None"
    page: int  # -1 for the root
    tokens: tuple[int, ...] = ()
    children: dict[tuple[int, ...], "Node"] = field(default_factory=dict)
    pins: int = 0


@dataclass(frozen=True)
class PrefixMatch:
    """Cached prefix: its first `length` tokens are in `pages`.

    The last page may be used only in part.
    """

    length: int
    pages: tuple[int, ...]
    node: Node  # node of the last page, or the root if there is none


@dataclass(frozen=True)
class Insertion:
    """Pages to fill with the blocks of PAGE tokens of a sequence, from block `first` on."""

    first: int
    pages: tuple[int, ...]


class PageTree:
    """Tree over pages 0..num_pages-1, all written by one version of the weights.

    A page is free or owned by one node. To make room, the least recently used unpinned leaf is
    evicted. Each adapter has its own root, so that no adapter reads pages of another one. Adapter
    None is for a model without several adapters.
    """

    def __init__(self, num_pages: int, version: int) -> None:
        self.version = version
        self.num_evicted = 0  # pages evicted to make room, and not for new weights
        self.num_pages = num_pages
        self._clock = 0
        self._clear()

    def _clear(self) -> None:
        self._roots: dict[int | None, Node] = {}
        self._free = list(range(self.num_pages))[::-1]
        self._nodes: list[Node | None] = [None] * self.num_pages
        self._last_used = np.zeros(self.num_pages, np.int64)
        self._evictable = np.zeros(self.num_pages, bool)

    @property
    def num_used(self) -> int:
        """Number of pages in use."""
        return self.num_pages - len(self._free)

    def reset(self, version: int) -> None:
        """Drop all pages for a new weights version. Earlier pins may still be released."""
        self.version = version
        self._clear()

    def match(self, ids: Sequence[int], adapter: int | None = None) -> PrefixMatch:
        """Return the longest cached prefix of `ids`. Marks its pages as used now."""
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
        return PrefixMatch(length, tuple(pages), node)

    def insert(self, ids: Sequence[int], version: int, adapter: int | None = None) -> Insertion:
        """Assign pages to the uncached part of `ids`, as far as there is room.

        Marks all pages as used now.

        The caller must fill the pages before it reads any. `version` is the version of the weights
        that computed all of `ids`. If it is not the tree's version, no page is assigned.
        """
        if version != self.version:
            return Insertion(0, ())
        ids = tuple(ids)
        self._clock += 1
        node, num_cached, pages = self._root(adapter), 0, []
        for start in range(0, len(ids), PAGE):
            child, is_cached = self._child(node, ids[start : start + PAGE])
            if child is None:
                break
            node = self._touch(child)
            if is_cached:
                num_cached += 1
            else:
                pages.append(node.page)
        return Insertion(num_cached, tuple(pages))

    def pin(self, node: Node) -> None:
        """Keep the node's page and those of its ancestors until `unpin`."""
        node.pins += 1
        self._update(node)

    def unpin(self, node: Node) -> None:
        """Release one pin."""
        assert node.pins > 0, "each pin is released once"
        node.pins -= 1
        self._update(node)

    def _root(self, adapter: int | None) -> Node:
        return self._roots.setdefault(adapter, Node(None, -1))

    def _child(self, node: Node, tokens: tuple[int, ...]) -> tuple[Node | None, bool]:
        """Return the child for `tokens`, and True if its page holds them already.

        None: no room for a child.

        With children (1 2 3) and (5 6): 1 2 is cached, 5 6 7 extends the second child, 1 9 is new.
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
        self.pin(node)  # eviction must not remove this path
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
        assert node is not None and node.parent is not None, (
            "only pages that the tree owns are evicted"
        )
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
        # The root has no page, and neither does a node from before a reset.
        if node.page >= 0 and self._nodes[node.page] is node:
            self._evictable[node.page] = not node.children and node.pins == 0


def num_shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Return the length of the common prefix."""
    differs = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differs, min(len(a), len(b)))
