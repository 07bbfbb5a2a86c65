"""Slots are given out first come, first served; prompts are cut into chunks with little padding."""

import pytest

from lightning_jax.serve.scheduler import Scheduler, plan_chunks


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
