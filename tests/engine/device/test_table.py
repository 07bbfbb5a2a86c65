"""Tests of the packed arrays that go to a decode step and come back."""

import jax
import jax.numpy as jnp
import numpy as np

from lightning_jax.engine.device.table import (
    NO_LIMIT,
    NO_TOKEN,
    End,
    SlotTable,
    after_step,
    pack_sampled,
    read_rows,
    takes_part,
    unpack_sampled,
)
from lightning_jax.engine.sampling import Likeliest, Sampled
from lightning_jax.engine.types import SamplingParams

SAMPLING = SamplingParams(temperature=0.7, top_p=0.9, top_k=2**40, min_p=0.05)
SEED = 0xFFFFFFFE_80000001  # both halves are negative as int32


def filled() -> SlotTable:
    table = SlotTable(4)
    table.begin(1, token=17, position=5, sampling=SAMPLING, seed=SEED, adapter=2)
    table.begin(3, token=19, position=9, sampling=SamplingParams(temperature=0.0), seed=1)
    return table


def test_settings_arrive_as_they_are() -> None:
    rows = read_rows(jnp.asarray(filled().next_steps([1])))
    assert rows.is_active.tolist() == [False, True, False, False]
    assert rows.is_first.tolist() == [False, True, False, True]
    assert (rows.token[1], rows.position[1], rows.count[1], rows.adapter[1]) == (17, 5, 0, 2)
    assert rows.key.dtype == jnp.uint32 and rows.key[1].tolist() == [2**32 - 2, 2**31 + 1]
    assert rows.key[3].tolist() == [0, 1]
    floats = [float(column[1]) for column in (rows.temperature, rows.top_p, rows.min_p)]
    np.testing.assert_array_equal(floats, np.array([0.7, 0.9, 0.05], np.float32))
    assert rows.top_k[1] == 2**31 - 1
    assert rows.left.tolist() == [0, NO_LIMIT, 0, NO_LIMIT] and (rows.end_ids[1] == NO_TOKEN).all()
    assert rows.temperature[3] == 0.0


def test_only_the_slots_that_step_are_counted() -> None:
    table = filled()
    assert table.positions([1, 3]).tolist() == [5, 9]
    table.next_steps([1])
    table.next_steps([1], 4)
    rows = read_rows(jnp.asarray(table.next_steps([3])))
    assert rows.position.tolist() == [0, 10, 0, 9] and rows.count.tolist() == [0, 5, 0, 0]
    assert rows.is_first.tolist() == [False, False, False, True]
    assert table.counts().tolist() == [0, 5, 0, 1] and table.positions([1]) == 10
    table.begin(1, token=3, position=2, sampling=SAMPLING, seed=0)
    assert table.counts()[1] == 0 and table.positions([1]) == 2


def test_steps_on_the_device_count_as_those_of_the_host() -> None:
    table, other = filled(), filled()
    packed = jnp.asarray(table.next_steps([1]))
    for _ in range(3):
        expected = jnp.asarray(other.next_steps([1]))
        np.testing.assert_array_equal(packed, expected)
        packed = after_step(packed)


def ending(end: End) -> SlotTable:
    table = SlotTable(2)
    for slot in (0, 1):
        table.begin(slot, token=5, position=7, sampling=SAMPLING, seed=1, end=end)
    return table


def test_steps_stop_at_the_limit_on_host_and_device() -> None:
    table, other = ending(End(limit=3)), ending(End(limit=3))
    packed = jnp.asarray(table.next_steps([0], 2))
    for _ in range(2):
        packed = after_step(packed)
    np.testing.assert_array_equal(packed[0], table.next_steps([0], 2)[0])
    packed = after_step(after_step(packed))  # one is left
    np.testing.assert_array_equal(packed[0], table.next_steps([0])[0])
    assert table.positions([0, 1]).tolist() == [10, 7] and table.counts().tolist() == [3, 0]
    rows = read_rows(jnp.asarray(other.next_steps([0, 1], 2)))
    assert takes_part(rows, jnp.array([5, 5])).all() and rows.left.tolist() == [3, 3]
    assert takes_part(read_rows(packed), jnp.array([9, 9])).tolist() == [False, False]


def test_an_end_token_ends_a_response_but_not_a_prompt() -> None:
    table = ending(End(ids={5, 900, 40_000}))
    first, later = (read_rows(jnp.asarray(table.next_steps([0, 1]))) for _ in range(2))
    assert takes_part(first, jnp.array([5, 5])).tolist() == [True, True]
    assert takes_part(later, jnp.array([6, 900])).tolist() == [True, False]
    assert takes_part(later, jnp.array([40_000, 0])).tolist() == [False, True]


def test_a_few_of_many_end_tokens_are_known() -> None:
    few, many = End(ids=range(10, 14)), End(ids=range(10, 15))
    assert few.is_whole and not many.is_whole
    for end in (few, many):
        rows = read_rows(jnp.asarray(ending(end).next_steps([0])))
        assert rows.end_ids[0].tolist() == [10, 11, 12, 13]


def test_a_packed_result_is_read_to_the_bit() -> None:
    rng = np.random.default_rng(0)
    logprobs = -rng.random((3, 5), np.float32)
    logprobs[1, 0] = 0.0
    tokens = np.array([0, 49151, 7, 8, 9], np.int32)
    best = Likeliest(rng.integers(0, 99, (5, 20), np.int32), -rng.random((5, 20), np.float32))
    for likeliest in (None, best):
        sampled = Sampled(tokens, logprobs[0], logprobs[1], logprobs[2], likeliest)
        packed = np.asarray(jax.jit(pack_sampled)(sampled, np.ones(5, bool)))
        assert packed.dtype == np.int32 and len(packed) == (44 if likeliest else 4)
        jax.tree.map(np.testing.assert_array_equal, unpack_sampled(packed), sampled)
        is_active = np.array([True, False, True, True, False])
        tokens = unpack_sampled(np.asarray(jax.jit(pack_sampled)(sampled, is_active))).tokens
        assert tokens.tolist() == [0, NO_TOKEN, 7, 8, NO_TOKEN]
