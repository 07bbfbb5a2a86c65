"""Tests that several steps in one dispatch do what as many single steps do, and stop at ends."""

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from engine_bench import SERVE, Slots

from lightning_jax.engine.device import slots as slots_module
from lightning_jax.engine.device.slots import Fill, SlotPrograms
from lightning_jax.engine.device.table import NO_TOKEN, End, unpack_sampled
from lightning_jax.engine.types import SamplingParams
from lightning_jax.models.config import LoraConfig
from lightning_jax.models.formats.load import LoadedModel
from lightning_jax.testing.tiny import tiny_model, tiny_policies

AT_ONCE = 4
NUM_STEPS = 5 * AT_ONCE
PROMPTS = ([1, 2, 3], list(range(30, 47)), [9, 9], list(range(60, 68)))
KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.8, top_k=20),
    SamplingParams(temperature=1.3, min_p=0.02),
)
LATE = 3  # the slot whose request comes after the first dispatch


@dataclass(frozen=True)
class Tokens:
    """Tokens of one response and their log-probabilities, [3, N]."""

    ids: list[int]
    logprobs: np.ndarray


def compiled(model: LoadedModel, steps: int) -> SlotPrograms:
    """Return programs whose steps in one dispatch are compiled."""
    programs = SlotPrograms(model.config, replace(SERVE, steps_per_dispatch=steps))
    if steps > 1:
        params = programs.put_on_mesh(model.params)
        table = Slots(programs, params).table.next_steps(())
        arguments = (programs._per_step(params), programs.init_state(), table)
        programs._steps_filtered.compile((1, SERVE.slots), *arguments)
    return programs


def begin(slots: Slots, slot: int, end: End, adapter: int | None) -> None:
    slots.fill(Fill(slot, 0, PROMPTS[slot][:-1], adapter))
    slots.activate(slot, PROMPTS[slot], KINDS[slot], 5 + slot, adapter, end)


def responses(
    programs: SlotPrograms, params: Any, ends: list[End], *, has_adapters: bool = False
) -> list[Tokens]:
    """Return the responses of four slots, of which one begins late."""
    slots, at_once = Slots(programs, params), programs.steps_per_dispatch
    chosen = [slot % 2 if has_adapters else None for slot in range(4)]
    for slot in range(LATE):
        begin(slots, slot, ends[slot], chosen[slot])
    results = []
    for step in range(0, NUM_STEPS, at_once):
        if step == AT_ONCE:
            begin(slots, LATE, ends[LATE], chosen[LATE])
        slots.state, packed = programs.generate(
            params, slots.state, slots.table, slots.running, steps=at_once
        )
        results += list(np.asarray(packed).reshape(at_once, -1, SERVE.slots))
    sampled = [unpack_sampled(packed) for packed in results]
    tokens = np.array([one.tokens for one in sampled])
    names = ("behavior_logprobs", "sampling_logprobs", "tempered_logprobs")
    logprobs = np.array([[getattr(one, name) for one in sampled] for name in names])
    made = [np.flatnonzero(tokens[:, slot] != NO_TOKEN) for slot in range(4)]
    for slot, steps in enumerate(made):  # no slot pauses
        first = AT_ONCE if slot == LATE else 0
        assert steps.tolist() == list(range(first, first + len(steps)))
    return [
        Tokens(tokens[steps, slot].tolist(), logprobs[:, steps, slot])
        for slot, steps in enumerate(made)
    ]


def cut(response: Tokens, end: End) -> Tokens:
    """Return a response up to its end, counted on the host."""
    ends = [i + 1 for i, token in enumerate(response.ids) if token in end.ids]
    length = min([*ends, end.limit, len(response.ids)])
    return Tokens(response.ids[:length], response.logprobs[:, :length])


def check_equal(one: Tokens, other: Tokens) -> None:
    assert one.ids == other.ids
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-6)


@pytest.mark.parametrize("kind", ["plain", "stacked", "adapters"])
def test_mixed_slots_get_the_tokens_of_single_steps(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_policies(LoraConfig(rank=2)) if kind == "adapters" else tiny_model(0, num_layers=1)
    if kind == "stacked":  # as on a GPU: the same weights are passed once for each step
        monkeypatch.setattr(slots_module, "platform_of", lambda _: "gpu")
    single, several = compiled(model, 1), compiled(model, AT_ONCE)
    assert (several._stacks, single._stacks) == (kind == "stacked",) * 2
    params = several.put_on_mesh(model.params)
    run = dict(has_adapters=kind == "adapters")
    endless = [End()] * 4
    full = responses(single, params, endless, **run)
    assert [len(one.ids) for one in full] == [NUM_STEPS] * 3 + [NUM_STEPS - AT_ONCE]
    for one, other in zip(responses(several, params, endless, **run), full, strict=True):
        check_equal(one, other)
    # In the middle of a dispatch, at a limit, at the border of two dispatches, and both at once.
    ends = [
        End(ids={full[0].ids[1], full[0].ids[9]}),
        End(limit=7, ids=set(range(3)) - set(full[1].ids)),
        End(limit=2 * AT_ONCE),
        End(limit=6, ids={full[LATE].ids[5]}),
    ]
    for programs in (single, several):
        ended = responses(programs, params, ends, **run)
        for one, other, end in zip(ended, full, ends, strict=True):
            check_equal(one, cut(other, end))
    assert [len(one.ids) for one in ended][1:3] == [7, 8] and len(ended[0].ids) <= 2


def test_nothing_is_written_past_an_end() -> None:
    model = tiny_model(0, num_layers=1)
    programs = compiled(model, AT_ONCE)
    params = programs.put_on_mesh(model.params)
    slots = Slots(programs, params)
    for slot, end in enumerate((End(limit=2), End())):
        begin(slots, slot, end, None)

    def row(slot: int) -> np.ndarray:
        return np.concatenate(slots.state.cache.layers[0].values, 2)[slot, 0]

    tokens = []
    for _ in range(2):
        slots.state, packed = programs.generate(
            params, slots.state, slots.table, [0, 1], steps=AT_ONCE
        )
        tokens += np.asarray(packed)[:, 0, 0].tolist()
    used = len(PROMPTS[0]) + 1  # the second token is sampled, but not fed
    assert row(0)[:used].any(axis=1).all() and not row(0)[used:].any()
    assert row(1)[: len(PROMPTS[1]) + 2 * AT_ONCE - 1].any(axis=1).all()
    assert NO_TOKEN not in tokens[:2] and tokens[2:] == [NO_TOKEN] * (2 * AT_ONCE - 2)
    assert slots.table.positions([0, 1]).tolist() == [4, len(PROMPTS[1]) - 1 + 2 * AT_ONCE]


def test_single_steps_serve_until_their_program_is_compiled() -> None:
    model = tiny_model(0, num_layers=1)
    programs = SlotPrograms(model.config, replace(SERVE, steps_per_dispatch=AT_ONCE))
    params = programs.put_on_mesh(model.params)
    slots = Slots(programs, params)
    begin(slots, 0, End(), None)

    def dispatch() -> int:
        slots.state, packed = programs.generate(
            params, slots.state, slots.table, [0], steps=AT_ONCE
        )
        return packed.ndim

    assert dispatch() == 2 and slots.table.counts()[0] == 1
    while not programs._steps_filtered.ready:
        time.sleep(0.01)
    assert dispatch() == 3 and slots.table.counts()[0] == 1 + AT_ONCE


def test_a_reused_slot_forgets_the_last_end() -> None:
    model = tiny_model(0, num_layers=1)
    programs = compiled(model, AT_ONCE)
    params = programs.put_on_mesh(model.params)
    slots, last = Slots(programs, params), PROMPTS[1][-1]
    made = []
    # The second prompt ends with a token that would end a response.
    for end in (End(limit=1), End(limit=3, ids={last}), End()):
        begin(slots, 1, end, None)
        slots.state, packed = programs.generate(
            params, slots.state, slots.table, [1], steps=AT_ONCE
        )
        tokens = np.asarray(packed)[:, 0, 1]
        made.append(tokens[tokens != NO_TOKEN].tolist())
    assert last not in made[2] and [len(ids) for ids in made] == [1, 3, 4]
    assert made[0] == made[2][:1] and made[1] == made[2][:3]
