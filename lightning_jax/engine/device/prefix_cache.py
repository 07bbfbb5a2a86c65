"""Cache of keys and values for prompts that share a prefix.

Cached pages are in a separate pool, so they outlive the slot rows. Rollouts of a group share their
prompt, and the turns of a rollout share their history, on any row. A request copies pages to its
row when it starts, and copies new ones back. It needs none while it runs. `adapter` is the index of
the adapter that reads. Adapters never share cached pages.
"""

from collections.abc import Sequence
from dataclasses import replace

from lightning_jax.engine.device.programs import DecodeState
from lightning_jax.engine.device.radix import PAGE, PageTree
from lightning_jax.engine.device.slots import SlotPrograms

MIN_REUSE = 8  # tokens; for fewer, copying a page costs more than computing them


class PrefixCache:
    """Pages of the engine and the radix tree that indexes them."""

    def __init__(self, programs: SlotPrograms, version: int) -> None:
        self._copier = programs.pages
        self.tree = PageTree(self._copier.num_pages, version)
        self._pool = self._copier.init_pool()

    def warmup(self, state: DecodeState) -> DecodeState:
        """Compile the page copies. Donates `state`."""
        cache, self._pool = self._copier.warmup(state.cache, self._pool)
        return replace(state, cache=cache)

    def restore(
        self, state: DecodeState, slot: int, ids: Sequence[int], adapter: int | None = None
    ) -> tuple[DecodeState, int]:
        """Copy the cached prefix of `ids` to the slot's row.

        Return the state and the prefix length.

        Donates `state`.
        """
        match = self.tree.match(ids, adapter)
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
        new = self.tree.insert(ids[: self._copier.num_blocks * PAGE], version, adapter)
        if new.pages:
            self._pool = self._copier.store(self._pool, new.pages, state.cache, slot, new.first)
