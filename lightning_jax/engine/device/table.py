"""Packed arrays of a decode step: one goes in with the slots' settings, one comes out.

Every array that goes between host and device is a copy of its own, and on an accelerator its cost
is the same for one number as for thousands. So the host keeps the settings of all slots in a table,
which it sends with every step, and a step returns all it has sampled in one array. Floats are
stored as their bits.

The table also says when each response ends: after a number of tokens, or with one of a few. So the
device knows by itself which slots to leave out of the next step. It takes no step past an end, also
where the host has started several steps, or the next ones before it has read the last.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from lightning_jax.engine.sampling import Likeliest, Sampled
from lightning_jax.engine.types import SamplingParams

MAX_TOP_K = NO_LIMIT = 2**31 - 1
MAX_END_IDS = 4  # of one slot; most models have one to three
NO_TOKEN = -1  # of a slot that a step left out, and in place of an end token


class Column(IntEnum):
    """Columns of the table of slots, int32 [S, 17]. The last MAX_END_IDS are end tokens."""

    POSITION = 0  # of the token that the next step feeds
    IS_ACTIVE = 1  # 1: takes part in this step
    IS_FIRST = 2  # 1: feed TOKEN, not the token sampled last
    TOKEN = 3
    KEY_HIGH = 4  # data of the request's PRNG key
    KEY_LOW = 5
    COUNT = 6  # response tokens sampled so far
    TEMPERATURE = 7
    TOP_P = 8
    TOP_K = 9
    MIN_P = 10
    ADAPTER = 11
    LEFT = 12  # response tokens until the limit
    END_IDS = 13


NUM_COLUMNS = Column.END_IDS + MAX_END_IDS


@dataclass(frozen=True)
class End:
    """End of a response: `limit` tokens, or one of the `ids`, of which the device knows some."""

    limit: int = NO_LIMIT
    ids: Collection[int] = ()

    @property
    def is_whole(self) -> bool:
        """True if the device knows all ids."""
        return len(self.ids) <= MAX_END_IDS


ENDLESS = End()


@dataclass(frozen=True)
class SlotRows:
    """Columns of the table on the device, for the first R slots."""

    position: Int32[Array, " R"]
    is_active: Bool[Array, " R"]
    is_first: Bool[Array, " R"]
    token: Int32[Array, " R"]
    key: UInt32[Array, "R 2"]
    count: Int32[Array, " R"]
    temperature: Float32[Array, " R"]
    top_p: Float32[Array, " R"]
    top_k: Int32[Array, " R"]
    min_p: Float32[Array, " R"]
    adapter: Int32[Array, " R"]
    left: Int32[Array, " R"]
    end_ids: Int32[Array, "R 4"]


class SlotTable:
    """Next token and sampling settings of every slot, on the host."""

    def __init__(self, num_slots: int) -> None:
        self._table = np.zeros((num_slots, NUM_COLUMNS), np.int32)

    def begin(
        self,
        slot: int,
        token: int,
        position: int,
        sampling: SamplingParams,
        seed: int,
        adapter: int | None = None,
        end: End = ENDLESS,
    ) -> None:
        """Put a request into a slot whose row holds the tokens before `position`.

        Response token k is sampled with the seed's key folded with k. Steps leave the slot out
        after the response's `end`.
        """
        row = self._table[slot]
        row[:] = 0
        row[Column.POSITION], row[Column.TOKEN], row[Column.IS_FIRST] = position, token, 1
        halves = np.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)
        row[Column.KEY_HIGH : Column.KEY_LOW + 1] = halves.view(np.int32)
        floats = (sampling.temperature, sampling.top_p, sampling.min_p)
        columns = (Column.TEMPERATURE, Column.TOP_P, Column.MIN_P)
        row[list(columns)] = np.array(floats, np.float32).view(np.int32)
        row[Column.TOP_K] = min(sampling.top_k, MAX_TOP_K)
        row[Column.ADAPTER] = adapter or 0
        row[Column.LEFT], row[Column.END_IDS :] = end.limit, NO_TOKEN
        ids = sorted(end.ids)[:MAX_END_IDS]
        row[Column.END_IDS : Column.END_IDS + len(ids)] = ids

    def positions(self, slots: Sequence[int]) -> Int32[np.ndarray, " N"]:
        """Return the positions of these slots' next tokens, the number that their rows hold."""
        return self._table[np.asarray(slots, np.intp), Column.POSITION]

    def next_steps(self, slots: Sequence[int], number: int = 1) -> Int32[np.ndarray, "S 17"]:
        """Return the table for the next steps of these slots alone, and count the steps as done.

        A slot takes as many of them as its limit leaves. One that the device finds ended takes
        fewer, but nobody asks for its numbers any more.
        """
        table, chosen = self._table.copy(), np.asarray(slots, np.intp)
        table[chosen, Column.IS_ACTIVE] = 1
        numbers = np.minimum(number, self._table[chosen, Column.LEFT])
        for column in (Column.POSITION, Column.COUNT):
            self._table[chosen, column] += numbers
        self._table[chosen, Column.LEFT] -= numbers
        self._table[chosen, Column.IS_FIRST] = 0
        return table

    def counts(self) -> Int32[np.ndarray, " S"]:
        """Return the number of response tokens that each slot has sampled."""
        return self._table[:, Column.COUNT].copy()


def read_rows(table: Int32[Array, "R 17"]) -> SlotRows:
    """Return the columns of the table in their own types."""

    def floats(column: Column) -> Float32[Array, " R"]:
        return jax.lax.bitcast_convert_type(table[:, column], jnp.float32)

    return SlotRows(
        position=table[:, Column.POSITION],
        is_active=table[:, Column.IS_ACTIVE] == 1,
        is_first=table[:, Column.IS_FIRST] == 1,
        token=table[:, Column.TOKEN],
        key=table[:, Column.KEY_HIGH : Column.KEY_LOW + 1].astype(jnp.uint32),
        count=table[:, Column.COUNT],
        temperature=floats(Column.TEMPERATURE),
        top_p=floats(Column.TOP_P),
        top_k=table[:, Column.TOP_K],
        min_p=floats(Column.MIN_P),
        adapter=table[:, Column.ADAPTER],
        left=table[:, Column.LEFT],
        end_ids=table[:, Column.END_IDS :],
    )


def takes_part(rows: SlotRows, fed: Int32[Array, " R"]) -> Bool[Array, " R"]:
    """Return True for slots that are active and whose response has not ended with the token `fed`.

    The first token that a slot feeds is the prompt's last one, which ends nothing.
    """
    is_end = jnp.any(fed[:, None] == rows.end_ids, axis=1) & ~rows.is_first
    return rows.is_active & (rows.left > 0) & ~is_end


def after_step(table: Int32[Array, "R 17"]) -> Int32[Array, "R 17"]:
    """Return the table of the next step of the same slots, as `SlotTable.next_steps` counts it."""
    active = table[:, Column.IS_ACTIVE]
    number = jnp.minimum(active, table[:, Column.LEFT])
    table = table.at[:, Column.POSITION].add(number).at[:, Column.COUNT].add(number)
    table = table.at[:, Column.LEFT].add(-number)
    return table.at[:, Column.IS_FIRST].set(table[:, Column.IS_FIRST] * (1 - active))


def pack_sampled(sampled: Sampled, is_active: Bool[Array, " R"]) -> Int32[Array, "F R"]:
    """Return all that a step has sampled as rows of one array, which `unpack_sampled` reads.

    The token of a slot that is not active is NO_TOKEN, so the tokens say how many a slot made.
    """

    def bits(values: Any) -> Int32[Array, "..."]:
        return jax.lax.bitcast_convert_type(values, jnp.int32)

    logprobs = (
        sampled.behavior_logprobs,
        sampled.sampling_logprobs,
        sampled.tempered_logprobs,
    )
    tokens = jnp.where(is_active, sampled.tokens, NO_TOKEN)
    rows = [tokens[None], *(bits(values)[None] for values in logprobs)]
    if sampled.likeliest is not None:
        rows += [sampled.likeliest.ids.T, bits(sampled.likeliest.logprobs).T]
    return jnp.concatenate(rows)


def unpack_sampled(packed: Int32[np.ndarray, "F R"]) -> Sampled:
    """Return the record of NumPy arrays that one step has packed."""
    tokens, *logprobs = packed[:4]
    behavior, drawn, tempered = (row.view(np.float32) for row in logprobs)
    best, ids, values = None, *np.split(packed[4:], 2)
    if len(ids):
        best = Likeliest(ids.T, values.view(np.float32).T)
    return Sampled(tokens, behavior, drawn, tempered, best)
