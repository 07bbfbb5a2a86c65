"""Tests of the way of spans from a sampler to the run's store."""

import asyncio
from collections.abc import Awaitable
from contextlib import closing
from pathlib import Path

import pytest
from coded import raises_coded

from lightning_jax.cluster import delivery
from lightning_jax.cluster.delivery import MAX_ITEMS, Outbox, Receipt, store_parcel
from lightning_jax.errors import InvalidValue
from lightning_jax.traces._sqlite import StoreError
from lightning_jax.traces.context import OpenSpan
from lightning_jax.traces.store import Store
from lightning_jax.types import Rollout, Span


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "LINGER_S", 0.01)


def span(name: str, sequence: int | None = None) -> Span:
    return OpenSpan(sequence=sequence).end(name, {"lightning.x": (1, 2)})


async def begin(recording: Awaitable[object]) -> "asyncio.Future[object]":
    task = asyncio.ensure_future(recording)
    await asyncio.sleep(0)
    return task


async def test_a_span_is_recorded_once_the_run_has_stored_it(tmp_path: Path) -> None:
    with closing(Store(tmp_path / "store.sqlite")) as store:
        store.add_rollout(Rollout("r", "t", "g", "train", 0, 0, 1, "queued"))
        outbox = Outbox(first_sequence=7)
        recording = await begin(outbox.record("r", span("call", outbox.next_sequence())))
        (sent,) = await outbox.take([])
        assert not recording.done() and store.spans("r") == []
        receipts = await store_parcel(store, [sent])
        assert [found.name for found in store.spans("r")] == ["call"]
        assert not recording.done()
        assert await outbox.take(receipts) == ()
        await recording
        assert store.spans("r")[0].sequence == 7


async def test_posted_spans_get_the_stores_answer_and_the_samplers_order(tmp_path: Path) -> None:
    with closing(Store(tmp_path / "store.sqlite")) as store:
        store.add_rollout(Rollout("r", "t", "g", "train", 0, 0, 1, "queued"))
        outbox, twice = Outbox(), span("tool")
        first = await begin(outbox.record_posted("r", [twice, span("other")]))
        second = await begin(outbox.record_posted("r", [twice]))
        await outbox.take(await store_parcel(store, await outbox.take([])))
        assert (await first, await second) == (([True, True], 0), ([False], 0))
        assert [found.sequence for found in store.spans("r")] == [1, 2]


async def test_a_store_that_fails_fails_the_call() -> None:
    outbox = Outbox()
    failing = await begin(outbox.record("r", span("call")))
    refused = await begin(outbox.record("r", span("call")))
    first, second = await outbox.take([])
    full, taken = "the disk is full", "the id is taken"
    await outbox.take(
        [Receipt(first.number, error=full), Receipt(second.number, error=taken, is_invalid=True)]
    )
    with raises_coded(StoreError, "not_recorded"):
        await failing
    with raises_coded(InvalidValue, "not_recorded"):
        await refused


async def test_the_store_gives_the_reason_of_a_refusal(tmp_path: Path) -> None:
    with closing(Store(tmp_path / "store.sqlite")) as store:
        store.add_rollout(Rollout("r", "t", "g", "train", 0, 0, 1, "queued"))
        outbox, again = Outbox(), span("call")
        for _ in range(2):
            await begin(outbox.record("r", again))
        stored, refused = await store_parcel(store, await outbox.take([]))
        assert stored.error is None and refused.is_invalid
        store.close()
        await begin(outbox.record(None, span("call")))
        (failed,) = await store_parcel(store, await outbox.take([stored, refused]))
        assert failed.error and not failed.is_invalid


async def test_parcels_are_bounded_and_in_order() -> None:
    outbox = Outbox()
    for index in range(MAX_ITEMS + 1):
        await begin(outbox.record(f"r{index}", span("call")))
    first, rest = await outbox.take([]), await outbox.take([])
    assert [sent.rollout_id for sent in [*first, *rest]] == [f"r{i}" for i in range(MAX_ITEMS + 1)]
    assert len(first) == MAX_ITEMS
    outbox.close()


async def test_calls_fail_once_the_run_is_silent() -> None:
    outbox = Outbox(silence_s=0.05)
    waiting = await begin(outbox.record("r", span("call")))
    with raises_coded(StoreError, "undelivered"):
        await waiting
    with raises_coded(StoreError, "undelivered"):
        await outbox.record("r", span("call"))
    with raises_coded(StoreError, "undelivered"):  # so that the run starts another sampler
        await outbox.take([])


async def test_a_run_that_waits_for_spans_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "LINGER_S", 0.2)
    outbox = Outbox(silence_s=0.05)
    first = await begin(outbox.record("r", span("call")))
    (sent,) = await outbox.take([])
    assert await outbox.take([Receipt(sent.number)]) == ()  # after LINGER_S
    await first
    await asyncio.wait_for(outbox.empty(), 1)


async def test_closing_fails_what_waits() -> None:
    outbox = Outbox()
    waiting = await begin(outbox.record("r", span("call")))
    outbox.close()
    with raises_coded(StoreError, "undelivered"):
        await waiting
