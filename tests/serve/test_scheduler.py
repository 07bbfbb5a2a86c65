"""Slots are given out first come, first served; prompts are cut into chunks with little padding."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_jax.serve.scheduler import Scheduler, plan_chunks, plan_prefill, row_counts


def test_waits_for_a_slot_in_order():
    who: Scheduler[str] = Scheduler(2)
    for name in ("a", "b", "c", "d"):
        who.enqueue(name)
    first, second = who.admit(), who.admit()
    assert first is not None and second is not None
    assert (first.request, second.request) == ("a", "b") and first.slot != second.slot
    assert who.admit() is None and who.num_waiting == 2
    assert who.remove("c") and not who.remove("c")
    who.release(first.slot)
    third = who.admit()
    assert third is not None and (third.request, third.slot) == ("d", first.slot)
    assert who.running == {second.slot: "b", first.slot: "d"}


def test_clear_gives_everybody_back():
    who: Scheduler[str] = Scheduler(1)
    who.enqueue("a")
    who.enqueue("b")
    who.admit()
    assert sorted(who.clear()) == ["a", "b"]
    assert not who.running and who.num_waiting == 0
    who.enqueue("c")
    assert who.admit() is not None


@pytest.mark.parametrize(
    ("num_tokens", "plan"),
    [
        (0, ()),
        (1, (64,)),
        (64, (64,)),
        (100, (64, 64)),
        (249, (256,)),
        (300, (256, 64)),
        (1000, (1024,)),
        (1100, (1024, 64, 64)),
    ],
)
def test_chunks_cover_the_prompt_with_little_padding(num_tokens, plan):
    assert plan_chunks(num_tokens, (64, 256, 1024)) == plan


def test_a_long_prompt_may_have_thousands_of_chunks():
    assert plan_chunks(100_000, (8, 32)) == (32,) * 3125


def test_a_program_takes_so_many_chunks_as_slots_and_its_tokens_allow():
    assert row_counts(32, 512, 16) == (1, 4, 16)
    assert row_counts(32, 512, 15) == row_counts(128, 512, 64) == (1, 4)
    assert row_counts(512, 512, 64) == row_counts(2048, 512, 64) == (1,)


def test_chunks_of_one_bucket_go_together_and_what_is_left_goes_alone():
    batches = list(plan_prefill([130, 100, 128, 0, 40, 120], (32, 128), {32: (1, 4), 128: (1, 4)}))
    assert [(batch.bucket, len(batch.chunks)) for batch in batches] == [
        (128, 4),
        (32, 1),
        (32, 1),
        (32, 1),
    ]
    assert batches[0].chunks == ((0, 0, 128), (1, 0, 100), (2, 0, 128), (5, 0, 120))
    assert [batch.chunks[0] for batch in batches[1:]] == [(0, 128, 130), (4, 0, 32), (4, 32, 40)]


@given(
    st.lists(st.integers(0, 700), max_size=20),
    st.sets(st.integers(1, 300), min_size=1, max_size=4),
    st.integers(1, 20),
)
def test_every_token_is_computed_once_and_in_order(lengths, sizes, slots):
    buckets = tuple(sorted(sizes))
    counts = {bucket: row_counts(bucket, 512, slots) for bucket in buckets}
    done = [0] * len(lengths)
    for batch in plan_prefill(lengths, buckets, counts):
        assert len(batch.chunks) in counts[batch.bucket]
        assert len({prompt for prompt, _, _ in batch.chunks}) == len(batch.chunks)
        for prompt, first, end in batch.chunks:
            assert first == done[prompt] and 0 < end - first <= batch.bucket
            done[prompt] = end
    assert done == lengths
