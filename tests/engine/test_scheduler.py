"""Tests of slot assignment in order of arrival, and of chunk plans with little padding."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_jax.engine.scheduler import (
    Pace,
    Scheduler,
    Unfilled,
    plan_chunks,
    plan_prefill,
    row_counts,
)


def test_waits_for_a_slot_in_order():
    who: Scheduler[str] = Scheduler(2)
    for name in ("a", "b", "c", "d"):
        who.enqueue(name)
    first, second = who.admit(), who.admit()
    assert first is not None and second is not None
    assert (first.request, second.request) == ("a", "b") and first.slot != second.slot
    assert who.admit() is None
    assert who.remove("c") and not who.remove("c")
    who.release(first.slot)
    third = who.admit()
    assert third is not None and (third.request, third.slot) == ("d", first.slot)
    assert who.running == {second.slot: "b", first.slot: "d"}


def test_tenants_take_turns():
    who: Scheduler[str] = Scheduler(4)
    for name in ("a1", "a2", "a3", "a4", "a5"):
        who.enqueue(name, "a")
    for name in ("b1", "b2"):
        who.enqueue(name, "b")
    admitted = [admission.request for admission in iter(who.admit, None)]
    assert admitted == ["a1", "b1", "a2", "b2"]


def test_a_slot_goes_to_the_tenant_with_the_fewest():
    who: Scheduler[str] = Scheduler(4)
    for name in ("a1", "a2", "a3", "a4"):
        who.enqueue(name, "a")
    first = who.admit()
    assert first is not None and who.admit() is not None
    who.enqueue("b1", "b")
    who.release(first.slot)
    second = who.admit()
    assert second is not None and second.request == "b1"


@pytest.mark.parametrize("tenant", ["a", None])
def test_a_tenant_or_a_call_of_none_leaves_the_last_slot_to_others(tenant):
    who: Scheduler[str] = Scheduler(4)
    for number in range(9):
        who.enqueue(f"big{number}", tenant, "big")
    assert len(list(iter(who.admit, None))) == 3
    assert who.admit() is None
    for name in ("b", "c"):
        who.enqueue(name, tenant and name, name)
        admission = who.admit()
        assert admission is not None and admission.request == name
        who.release(admission.slot)
    assert who.admit() is None  # left to others again
    who.release(0)
    admission = who.admit()
    assert admission is not None and admission.request == "big3"


def test_calls_of_one_tenant_take_turns():
    who: Scheduler[str] = Scheduler(4)
    for name in ("big0", "big1", "big2", "big3"):
        who.enqueue(name, "a", "big")
    who.enqueue("small", "a", "small")
    assert [admission.request for admission in iter(who.admit, None)] == ["big0", "small", "big1"]
    who.enqueue("late", "a", "late")
    who.release(0)
    admission = who.admit()
    assert admission is not None and admission.request == "late"
    assert who.remove("big3") and not who.remove("big3")


@pytest.mark.parametrize(("slots", "tenant"), [(1, "a"), (4, None)])
def test_one_slot_and_requests_of_no_call_are_not_held_back(slots, tenant):
    who: Scheduler[str] = Scheduler(slots)
    for number in range(6):
        who.enqueue(str(number), tenant)
    assert len(list(iter(who.admit, None))) == slots


callers = st.tuples(st.sampled_from(("a", "b", None)), st.sampled_from(("x", "y", None)))


@given(st.lists(st.tuples(callers, st.booleans()), max_size=60))
def test_nobody_is_lost_and_each_call_keeps_its_order(events):
    who: Scheduler[tuple[Any, int]] = Scheduler(3)
    served: list[tuple[Any, int]] = []
    for number, (caller, frees) in enumerate(events):
        who.enqueue((caller, number), *caller)
        served += [admission.request for admission in iter(who.admit, None)]
        if frees and who.running:
            who.release(min(who.running))
    while who.running:
        who.release(min(who.running))
        served += [admission.request for admission in iter(who.admit, None)]
    assert sorted(number for _, number in served) == list(range(len(events)))
    for caller in {caller for caller, _ in events}:
        numbers = [number for name, number in served if name == caller]
        assert numbers == sorted(numbers)


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


def test_a_pace_estimates_by_chunks_and_context():
    pace = Pace((8, 32), even_context=100.0)
    # Unmeasured: the shortest chunk of one prompt, after those that need nothing.
    nothing, long = Unfilled(20, 0), Unfilled(0, 100)
    assert pace.take([nothing, long, long], 9.0) == [nothing, Unfilled(0, 8)]
    assert pace.least(long) == Unfilled(0, 8) and pace.least(Unfilled(40, 3)) == Unfilled(40, 3)
    # 32 tokens around position 100 are (32 + 32) * 2 of work, at 2 s each.
    pace.add([Unfilled(84, 32)], 256.0)
    assert pace.take([Unfilled(84, 32)], 256.1) == [Unfilled(84, 32)]
    assert pace.take([Unfilled(84, 32)], 240.0) == [Unfilled(84, 8)]  # 2 * 40 * 1.88 s
    assert pace.take([Unfilled(84, 32)], 150.0) == []
    # The first takes 2 * 64 * 1.16 = 148.5 s, and 8 of the second 2 * 40 * 1.04 = 83.2.
    assert pace.take([Unfilled(0, 32), long, long], 232.0) == [Unfilled(0, 32), Unfilled(0, 8)]
    assert pace.take([Unfilled(0, 32), nothing, long], 231.0) == [Unfilled(0, 32), nothing]
    # Then the machine is twice as slow: 3 s on average.
    pace.add([Unfilled(84, 32)], 512.0)
    assert pace.take([Unfilled(84, 32)], 383.0) == [Unfilled(84, 24)]
    assert pace.take([Unfilled(84, 32)], 384.1) == [Unfilled(84, 32)]
    pace.add([Unfilled(84, 32)], -1.0)  # 1.5 s on average
    assert pace.take([Unfilled(84, 32)], 193.0) == [Unfilled(84, 32)]
    assert pace.take([Unfilled(84, 32)], 191.0) == [Unfilled(84, 24)]


@given(
    st.lists(st.tuples(st.integers(0, 900), st.integers(0, 900)), min_size=1, max_size=6),
    st.sets(st.integers(1, 300), min_size=1, max_size=4),
    st.floats(0.0, 1e4),
)
def test_parts_of_prompts_begin_where_these_do(prompts, buckets, seconds):
    unfilled = [Unfilled(*prompt) for prompt in prompts]
    pace = Pace(sorted(buckets), even_context=300.0)
    for _ in range(2):
        parts = pace.take(unfilled, seconds)
        for part, prompt in zip(parts, unfilled, strict=False):
            assert part.start == prompt.start and part.number <= prompt.number
        assert all(p == u for p, u in zip(parts[:-1], unfilled, strict=False))
        pace.add([Unfilled(0, 10)], 10.0)
