"""Which token ids each slot row of the KV cache holds. Host bookkeeping; the arrays are the
engine's.

A row stays valid after its request ends, until another request overwrites it or the weights change.
Whatever a row holds up to some length never changes while its request runs on, so an active row may
be copied from as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int


@dataclass(frozen=True)
class Match:
    """The row that shares the longest prefix with a prompt. Length 0: no row does."""

    slot: int
    length: int


class PrefixCache:
    """Token ids per row, all written by one version of the weights; other rows count as empty."""

    def __init__(self, slots: int, max_len: int) -> None:
        self._tokens = np.zeros((slots, max_len), np.int32)
        self._lengths = np.zeros(slots, np.int64)
        self._stale = np.zeros(slots, bool)  # a request that began under older weights is on it
        self._last_used = np.zeros(slots, np.int64)
        self._clock = 0

    def length(self, slot: int) -> int:
        """How many positions of the row are known and valid."""
        return int(self._lengths[slot])

    def match(self, prompt: Sequence[int]) -> Match:
        """The longest prefix of `prompt` that a row holds; of equal rows the one used last."""
        ids = np.asarray(prompt, np.int32)[: self._tokens.shape[1]]
        if not ids.size:
            return Match(0, 0)
        differs = self._tokens[:, : ids.size] != ids[None, :]
        first = np.where(differs.any(axis=1), differs.argmax(axis=1), ids.size)
        shared = np.minimum(first, self._lengths)
        slot = int(np.lexsort((self._last_used, shared))[-1])
        return Match(slot, int(shared[slot]))

    def write(self, slot: int, ids: Sequence[int]) -> None:
        """The row now holds exactly `ids`, computed by the current weights."""
        self._tokens[slot, : len(ids)] = ids
        self._lengths[slot] = len(ids)
        self._stale[slot] = False
        self.touch(slot)

    def append(self, slots: Int[np.ndarray, " N"], tokens: Int[np.ndarray, " N"]) -> None:
        """One more position a row, from decoding. Rows begun under older weights stay empty."""
        fresh = ~self._stale[slots] & (self._lengths[slots] < self._tokens.shape[1])
        slots, tokens = slots[fresh], tokens[fresh]
        self._tokens[slots, self._lengths[slots]] = tokens
        self._lengths[slots] += 1

    def touch(self, slot: int) -> None:
        """Marks the row as used now."""
        self._clock += 1
        self._last_used[slot] = self._clock

    def forget_all(self) -> None:
        """New weights: no new request may read what is cached, running rows included."""
        self._lengths[:] = 0
        self._stale[:] = True

    def least_recent(self, slots: Sequence[int]) -> int:
        """Of `slots`, the one to overwrite first: an empty one, else the one unused for longest."""
        return min(slots, key=lambda slot: (self._lengths[slot] > 0, self._last_used[slot], slot))
