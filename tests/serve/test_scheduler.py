"""Slots are given out first come, first served, next to what their prompts share."""

import numpy as np
import pytest

from lightning_jax.serve.prefix_cache import PrefixCache
from lightning_jax.serve.scheduler import MIN_REUSE, Scheduler, plan_chunks

A = tuple(range(100, 120))


def scheduler(slots: int) -> tuple[Scheduler[str], PrefixCache]:
    prefixes = PrefixCache(slots, 64)
    return Scheduler(slots, prefixes), prefixes


def append(prefixes: PrefixCache, slot: int, token: int) -> None:
    prefixes.append(np.array([slot]), np.array([token]))


def admit(who: Scheduler[str], prefixes: PrefixCache, name: str, prompt: tuple[int, ...]):
    who.enqueue(name, prompt)
    admission = who.admit()
    assert admission is not None
    prefixes.write(admission.slot, prompt[:-1])
    return admission


def test_waits_for_a_slot_in_order():
    who, _ = scheduler(1)
    for name in ("a", "b", "c"):
        who.enqueue(name, A)
    first = who.admit()
    assert first is not None and first.request == "a"
    assert who.admit() is None and who.num_waiting == 2
    assert who.remove("b") and not who.remove("b")
    who.release(first.slot)
    second = who.admit()
    assert second is not None and second.request == "c"


def test_siblings_copy_the_running_prompt_all_but_its_last_token():
    who, prefixes = scheduler(3)
    first = admit(who, prefixes, "a", A)
    second = admit(who, prefixes, "b", A)
    assert first.reuse == 0
    assert (second.source, second.reuse) == (first.slot, len(A) - 1)
    assert second.slot != first.slot


def test_the_next_turn_continues_its_own_row_in_place():
    who, prefixes = scheduler(3)
    first = admit(who, prefixes, "turn 1", A)
    append(prefixes, first.slot, A[-1])
    append(prefixes, first.slot, 7)
    who.release(first.slot)
    turn = admit(who, prefixes, "turn 2", (*A, 7, 8, 9, 10))
    assert (turn.slot, turn.source, turn.reuse) == (first.slot, first.slot, len(A) + 1)


def test_a_row_that_goes_on_differently_is_copied_not_overwritten():
    who, prefixes = scheduler(3)
    first = admit(who, prefixes, "a", (*A, 1, 2, 3))
    who.release(first.slot)
    other = admit(who, prefixes, "b", (*A, 5, 6))
    assert other.slot != first.slot and other.source == first.slot
    assert other.reuse == len(A)


def test_a_short_match_is_not_worth_a_copy():
    who, prefixes = scheduler(2)
    admit(who, prefixes, "a", A)
    other = admit(who, prefixes, "b", (*A[: MIN_REUSE - 1], 5, 6, 7))
    assert other.reuse == 0


def test_nothing_is_reused_across_versions():
    who, prefixes = scheduler(2)
    first = admit(who, prefixes, "a", A)
    prefixes.forget_all()
    append(prefixes, first.slot, A[-1])  # it runs on under the new weights
    assert prefixes.match(A).length == 0
    who.release(first.slot)
    second = admit(who, prefixes, "b", A)
    assert second.reuse == 0
    assert prefixes.match(A).length == len(A) - 1


def test_the_row_unused_for_longest_is_overwritten():
    who, prefixes = scheduler(2)
    first = admit(who, prefixes, "a", tuple(range(10)))
    second = admit(who, prefixes, "b", tuple(range(20, 30)))
    who.release(second.slot)
    who.release(first.slot)
    assert admit(who, prefixes, "c", tuple(range(40, 50))).slot == second.slot


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


def test_a_full_row_takes_no_more():
    prefixes = PrefixCache(1, 4)
    prefixes.write(0, [1, 2, 3])
    for token in (4, 5, 6):
        append(prefixes, 0, token)
    assert prefixes.length(0) == 4
    assert prefixes.match([1, 2, 3, 4, 5]).length == 4
