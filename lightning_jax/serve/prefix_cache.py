"""Keys and values of what was computed before, for the requests that begin with it.

What is cached lies in a pool of pages of its own, so it outlives the slot rows: siblings of a group
share their prompt, and the turns of a rollout their history, whichever rows they run on. A request
copies pages to its row when it begins and back when it has something new; while it runs it needs
none. `adapter` is the one, of several, that reads: what one computed is never given to another.
"""

from collections.abc import Sequence
from dataclasses import replace

from lightning_jax.serve.engine import Engine
from lightning_jax.serve.programs import DecodeState
from lightning_jax.serve.radix import PAGE, Node, PageTree

MIN_REUSE = 8  # tokens; copying a page for fewer costs more than computing them


class PrefixCache:
    """The engine's pages and the tree that says what is in them."""

    def __init__(self, engine: Engine, version: int) -> None:
        self._copier = engine.pages
        self._tree = PageTree(self._copier.num_pages, version)
        self._pool = self._copier.init_pool()

    @property
    def pages_used(self) -> int:
        """How many pages hold something now."""
        return self._tree.num_used

    @property
    def evicted_pages(self) -> int:
        """How many pages were given away for others so far. New weights do not count."""
        return self._tree.num_evicted

    def warmup(self, state: DecodeState) -> DecodeState:
        """Compiles what copies pages. Donates `state`."""
        cache, self._pool = self._copier.warmup(state.cache, self._pool)
        return replace(state, cache=cache)

    def hold(self, ids: Sequence[int], adapter: int | None = None) -> Node:
        """Keeps what is cached of `ids` until `let_go`: somebody who waits begins with it.

        Without it, conversations that take turns and do not all fit evict each other's pages just
        before they are due.
        """
        node = self._tree.match(ids, adapter).node
        self._tree.pin(node)
        return node

    def let_go(self, node: Node) -> None:
        """Ends a `hold`."""
        self._tree.unpin(node)

    @property
    def keeps(self) -> bool:
        """Whether it has any room."""
        return self._copier.num_pages > 0

    def match(self, ids: Sequence[int], adapter: int | None = None) -> int:
        """How many of the first of `ids` are cached."""
        return self._tree.match(ids, adapter).length

    def restore(
        self, state: DecodeState, slot: int, ids: Sequence[int], adapter: int | None = None
    ) -> tuple[DecodeState, int]:
        """The state with the slot's row beginning like `ids`, and for how many tokens it does.

        Donates `state`.
        """
        match = self._tree.match(ids, adapter)
        if match.length < MIN_REUSE:
            return state, 0
        cache = self._copier.restore(state.cache, slot, self._pool, match.pages)
        return replace(state, cache=cache), match.length

    def keep(
        self,
        state: DecodeState,
        slot: int,
        ids: Sequence[int],
        version: int,
        adapter: int | None = None,
    ) -> None:
        """Caches `ids`, which the slot's row begins with, as far as there is room.

        `version` is the weights' when the request began: if they changed since, nothing is kept.
        """
        new = self._tree.insert(ids[: self._copier.num_blocks * PAGE], version, adapter)
        if new.pages:
            self._pool = self._copier.store(self._pool, new.pages, state.cache, slot, new.first)

    def forget_all(self, version: int) -> None:
        """New weights: nothing that older ones computed is ever read again."""
        self._tree.reset(version)

    def keep_all(self, version: int) -> None:
        """The same weights under a new version: what they computed stays."""
        self._tree.version = version
