"""Tests of admission: a full queue refuses only tenants that already have their share."""

import asyncio

import pytest

from lightning_jax.engine.admission import Intake
from lightning_jax.engine.generation import Generation, QueueFull


def _intake() -> Intake[str]:
    return Intake(slots=2, max_queue=6, max_len=16, vocab_size=16)


def _add(intake: Intake[str], tenant: str | None) -> Generation:
    generation = Generation(lambda _: None)
    intake.add(generation, "request", tenant)
    return generation


async def test_a_flood_refuses_only_its_tenant() -> None:
    intake = _intake()
    flood = [_add(intake, "a") for _ in range(8)]
    with pytest.raises(QueueFull):
        _add(intake, "a")
    for _ in range(4):  # half of the capacity
        _add(intake, "b")
    with pytest.raises(QueueFull):
        _add(intake, "b")
    _add(intake, "c")
    _add(intake, None)
    assert len(intake) == 14
    intake.remove(flood)
    assert len(intake) == 6
    _add(intake, "a")


async def test_a_full_queue_holds_at_most_twice_its_size() -> None:
    intake = _intake()
    for number in range(200):
        tenant = str(number % 7)
        try:
            _add(intake, tenant)
        except QueueFull:
            continue
    assert len(intake) <= 16


async def test_a_request_is_removed_once() -> None:
    intake = _intake()
    generation = _add(intake, "a")
    intake.remove([generation, generation])
    intake.remove([generation])
    assert len(intake) == 0
    await asyncio.wait_for(intake.drain(), 5)
