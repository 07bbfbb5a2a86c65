"""Cache of keys and values for prompts that share a prefix.

Cached pages are in a separate pool, so they outlive the slot rows. Rollouts of a group share their
prompt, and the turns of a rollout share their history, on any row. A request copies pages to its
row when it starts, and copies new ones back. It needs none while it runs. `adapter` is the index of
the adapter that reads. Adapters never share cached pages.
"""

from collections.abc import Sequence
from dataclasses import replace

from lightning_jax.engine.device.programs import DecodeState
from lightning_jax.engine.device.radix import PAGE, Node, PageTree
from lightning_jax.engine.device.slots import SlotPrograms

MIN_REUSE = 8  # tokens; for fewer, copying a page costs more than computing them


class PrefixCache:
    """Pages of the engine and the radix tree that indexes them."""

    def __init__(self, programs: SlotPrograms, version: int) -> None:
        self._copier = programs.pages
        self._tree = PageTree(self._copier.num_pages, version)
        self._pool = self._copier.init_pool()

    @property
    def pages_used(self) -> int:
        """Number of pages in use."""
        return self._tree.num_used

    @property
    def evicted_pages(self) -> int:
        """Number of pages evicted so far to make room.

        Pages dropped for new weights do not count.
        """
        return self._tree.num_evicted

    def warmup(self, state: DecodeState) -> DecodeState:
        """Compile the page copies. Donates `state`."""
        cache, self._pool = self._copier.warmup(state.cache, self._pool)
        return replace(state, cache=cache)

    def hold(self, ids: Sequence[int], adapter: int | None = None) -> Node:
        """Pin the cached prefix of `ids` until `let_go`, for a waiting request that needs it.

        Otherwise conversations that take turns and do not all fit would evict each other's pages
        just before they are due.
        """
        node = self._tree.match(ids, adapter).node
        self._tree.pin(node)
        return node

    def let_go(self, node: Node) -> None:
        """Release a `hold`."""
        self._tree.unpin(node)

    @property
    def keeps(self) -> bool:
        """True if the cache has any pages."""
        return self._copier.num_pages > 0

    def match(self, ids: Sequence[int], adapter: int | None = None) -> int:
        """Return the length of the cached prefix of `ids`."""
        return self._tree.match(ids, adapter).length

    def restore(
        self, state: DecodeState, slot: int, ids: Sequence[int], adapter: int | None = None
    ) -> tuple[DecodeState, int]:
        """Copy the cached prefix of `ids` to the slot's row.

        Return the state and the prefix length.

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
        """Cache `ids`, which the slot's row starts with, as far as there is room.

        `version` is the weights version at the start of the request. If the weights changed since,
        nothing is cached.
        """
        new = self._tree.insert(ids[: self._copier.num_blocks * PAGE], version, adapter)
        if new.pages:
            self._pool = self._copier.store(self._pool, new.pages, state.cache, slot, new.first)

    def forget_all(self, version: int) -> None:
        """Drop all pages, because the weights have changed."""
        self._tree.reset(version)

    def keep_all(self, version: int) -> None:
        """Keep all pages under a new version of the same weights."""
        self._tree.version = version
