"""Tests that rendering with a memory takes linear time and matches the old quadratic algorithm."""

import hashlib
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from templates import TEMPLATES, tokenizer_with

from lightning_jax.gateway.prompt import render as module
from lightning_jax.gateway.prompt.habits import template_text
from lightning_jax.gateway.prompt.messages import normalize_message, normalize_messages
from lightning_jax.gateway.prompt.render import (
    ConversationMemory,
    Generated,
    Rendered,
    render_prompt,
)
from lightning_jax.gateway.prompt.tool_formats import format_of
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.testing.tiny import tiny_tokenizer

TOKENIZERS = {name: tokenizer_with(text) for name, text in TEMPLATES.items()}
END = min(tiny_tokenizer().eos_ids)


class OldMemory:
    """All responses of each message, newest first."""

    def __init__(self) -> None:
        self._generated: dict[str, list[Generated]] = {}
        self.histories: list[str] = []

    def add(self, message: Any, generated: Generated) -> None:
        plain = normalize_message(message, "response")
        self.histories += [generated.prompt.history] * bool(module._fingerprint(plain))
        keys = {module._fingerprint(plain), module._fingerprint(module._without_call_ids(plain))}
        for key in keys if generated.token_ids else ():
            if key:
                self._generated.setdefault(key, []).append(generated)

    def recall(self, message: Any) -> tuple[Generated, ...]:
        return tuple(reversed(self._generated.get(module._fingerprint(message), ())))


def old_render(messages: Any, tokenizer: Tokenizer, memory: OldMemory) -> Rendered:
    """Render with the quadratic algorithm that `render_prompt` replaced.

    It compares whole prompts and searches for one mark at a time.
    """
    plain = normalize_messages(messages)
    digests = module._digests(plain, None, None)
    known = {
        i: found
        for i, message in enumerate(plain)
        if message["role"] == "assistant" and (found := memory.recall(message))
    }
    form = format_of(tokenizer)
    pieces, marked = old_pieces(
        plain, lambda turns: template_text(turns, None, tokenizer, form), tuple(known)
    )
    base = next(
        (
            (index, generated)
            for index in sorted(known, reverse=True)
            for generated in known[index]
            if generated.prompt.history == digests[index]
        ),
        None,
    )
    start, recorded = 0, None
    if base is not None and base[0] in marked:
        start, recorded = marked.index(base[0]), base[1]
    ids = tokenizer.encode(pieces[start]) if recorded is None else list(recorded.prompt.token_ids)
    extends = True
    for position, (index, piece) in enumerate(
        zip(marked[start:], pieces[start + 1 :], strict=True)
    ):
        found = known[index]
        chosen = next((g for g in found if g.prompt.token_ids == tuple(ids)), found[0])
        if recorded is not None and position == 0:
            chosen = recorded
        extends = chosen.prompt.token_ids == tuple(ids)
        tail, last = tokenizer.encode(piece), chosen.token_ids[-1]
        cut = last in tokenizer.eos_ids and tail[:1] == [last]
        ids = [*ids, *chosen.token_ids, *(tail[1:] if cut else tail)]
    replayed = set(marked) | {i for i in known if base and recorded and i < base[0]}
    edited = [
        message["role"] == "assistant" and digests[i] in memory.histories and i not in known
        for i, message in enumerate(plain)
    ]
    whole = extends and not any(edited) and len(replayed) == len(known)
    return Rendered(tuple(ids), len(replayed), int(not whole), digests[-1])


def old_pieces(
    messages: Any, write: Callable[[Any], str], replayed: tuple[int, ...]
) -> tuple[list[str], list[int]]:
    digest = hashlib.blake2b(json.dumps(messages, sort_keys=True).encode(), digest_size=12)
    marks = {index: f"@@{digest.hexdigest()}-{index}@@" for index in replayed}
    marked = [
        {"role": message["role"], "content": marks[index]} if index in marks else message
        for index, message in enumerate(messages)
    ]
    text = write(marked)
    found = tuple(index for index, mark in marks.items() if text.count(mark) == 1)
    if len(found) < len(marks):
        return old_pieces(messages, write, found)
    order = sorted(marks, key=lambda index: text.index(marks[index]))
    pieces = []
    for index in order:
        piece, _, text = text.partition(marks[index])
        pieces.append(piece)
    return [*pieces, text], order


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1.0}'}}
ANSWERS: list[Any] = [
    {"role": "assistant", "content": "ok"},
    {"role": "assistant", "content": "\ufffd"},
    {"role": "assistant", "content": "<think>x</think>y"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
]
TURNS: list[Any] = [
    {"role": "user", "content": "hi"},
    {"role": "user", "content": "ho"},
    {"role": "tool", "content": "1", "tool_call_id": "c"},
]
SAMPLED = [(200, END), (201, END), (202,), (111, 107)]
# The agent's next step: send a turn, get an answer, or go back.
steps = st.lists(
    st.one_of(
        st.tuples(st.just("turn"), st.sampled_from(range(len(TURNS))), st.just(0)),
        st.tuples(st.just("answer"), st.sampled_from(range(len(ANSWERS))), st.integers(0, 3)),
        st.tuples(st.just("foreign"), st.sampled_from(range(len(ANSWERS))), st.just(0)),
        st.tuples(st.just("back"), st.integers(0, 4), st.just(0)),
    ),
    max_size=14,
)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None, max_examples=25)
@given(steps=steps)
def test_every_conversation_renders_as_before(name: str, steps: list[tuple[str, int, int]]) -> None:
    tokenizer, memory, old = TOKENIZERS[name], ConversationMemory(), OldMemory()
    messages = [TURNS[0]]
    for kind, which, sampled in steps:
        new, expected = (
            render_prompt(messages, None, tokenizer, memory),
            old_render(messages, tokenizer, old),
        )
        for field in ("token_ids", "replayed", "breaks", "history"):
            assert getattr(new, field) == getattr(expected, field), field
        match kind:
            case "turn":
                messages = [*messages, TURNS[which]]
            case "foreign":
                messages = [*messages, ANSWERS[which]]
            case "back":
                messages = [TURNS[0], *messages[1 : 1 + which]]
            case "answer":
                for ids in (SAMPLED[sampled], SAMPLED[sampled - 1]):
                    made = Generated(new, ids)
                    memory.add(ANSWERS[which], made)
                    old.add(ANSWERS[which], made)
                messages = [*messages, ANSWERS[which]]


@pytest.mark.parametrize("same_text", [True, False], ids=["one answer", "different answers"])
def test_cpu_time_grows_with_the_number_of_turns(same_text: bool) -> None:
    """Eight times the turns take eight times as long; the quadratic algorithm took 64 times as
    long.
    """
    tokenizer = TOKENIZERS["smollm"]

    def cost(turns: int) -> float:
        memory, messages = ConversationMemory(), [TURNS[0]]
        ids = tuple(tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"))
        for turn in range(turns):
            answer = {"role": "assistant", "content": "ok" if same_text else f"ok {turn}"}
            sampled = (*tokenizer.encode(answer["content"]), END)
            prompt = Rendered(ids, 0, 0, path=module._Path(ids).digest)
            memory.add(answer, Generated(prompt, sampled))
            messages = [*messages, answer, TURNS[0]]
            again = tokenizer.encode("\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
            ids = (*ids, *sampled, *again)
        times = []
        for _ in range(3):
            began = time.thread_time()
            rendered = render_prompt(messages, None, tokenizer, memory)
            times.append(time.thread_time() - began)
            assert (rendered.token_ids, rendered.replayed, rendered.breaks) == (ids, turns, 0)
        return min(times)

    small, large = cost(60), cost(480)
    assert large < 24 * small
