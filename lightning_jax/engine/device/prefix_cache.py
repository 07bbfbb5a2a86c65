"""Cache of keys and values for prompts that share a prefix.

Cached pages are in a separate pool, so they outlive the slot rows. Rollouts of a group share their
prompt, and the turns of a rollout share their history, on any row. A request copies pages to its
row when it starts, and copies new ones back. It needs none while it runs. Adapters never share
cached pages. All copies of a turn of the engine are made together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_jax.engine.device.pages import Move
from lightning_jax.engine.device.programs import DecodeState
from lightning_jax.engine.device.radix import PAGE, PageTree
from lightning_jax.engine.device.slots import SlotPrograms

MIN_REUSE = 8  # tokens; for fewer, copying a page costs more than computing them


@dataclass(frozen=True)
class Row:
    """Row of the slots' cache, and the tokens at its start."""

    slot: int
    ids: Sequence[int]
    version: int  # of the weights at the start of the request
    adapter: int | None = None  # index of the adapter that reads


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

    def restore(self, state: DecodeState, rows: Sequence[Row]) -> tuple[DecodeState, list[int]]:
        """Copy the cached prefix of each row's tokens to the row.

        Return the state and the lengths of the prefixes. Donates `state`.
        """
        lengths, moves = [], []
        for row in rows:
            match = self.tree.match(row.ids, row.adapter)
            is_used = match.length >= MIN_REUSE
            lengths.append(match.length if is_used else 0)
            pages = match.pages if is_used else ()
            moves += [Move(page, row.slot, block) for block, page in enumerate(pages)]
        if moves:
            cache = self._copier.restore(state.cache, self._pool, moves)
            state = replace(state, cache=cache)
        return state, lengths

    def keep(self, state: DecodeState, rows: Sequence[Row]) -> None:
        """Cache the tokens of the rows, as far as there is room.

        If the weights changed since a request started, nothing of its row is cached.
        """
        moves: dict[int, Move] = {}  # by page: one row's insertion may evict another's pages
        for row in rows:
            ids = row.ids[: self._copier.num_blocks * PAGE]
            new = self.tree.insert(ids, row.version, row.adapter)
            for block, page in enumerate(new.pages, new.first):
                moves[page] = Move(page, row.slot, block)
        if moves:
            self._pool = self._copier.store(self._pool, state.cache, list(moves.values()))
