"""Tests of whole conversations with tools: responses return as the ids that were sampled."""

import json
import random
from typing import Any

import pytest
from templates import TEMPLATES, tokenizer_with

from lightning_jax.engine.types import Completion
from lightning_jax.gateway.answer import Answer, AnswerBuilder
from lightning_jax.gateway.prompt.render import (
    ConversationMemory,
    Generated,
    Rendered,
    render_prompt,
)
from lightning_jax.gateway.prompt.tool_calls import ToolCallParser
from lightning_jax.gateway.prompt.tool_formats import ToolFormat, format_of
from lightning_jax.models.tokenizer import Tokenizer

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("search", "add")
]
CONVERSATIONS = 60  # for each template and seed; three seeds


def _sampled(rng: random.Random, form: ToolFormat, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return response ids that a policy might sample: blanks, think blocks, calls, raw bytes."""
    text = rng.choice(["", " ", "\n\n", "<think>\nhm\n</think>\n\n", "</think>", "Let me see. "])
    text += rng.choice(["", "It is 5.", "ok ok\n", "  tail  ", "über"])
    calls: list[tuple[str, Any]] = [
        (
            rng.choice(["search", "add"]),
            {"q": rng.choice(["a", "ü", '"', ""]), "n": rng.choice([rng.random(), 2.0])},
        )
        for _ in range(rng.choice([0, 0, 1, 1, 2, 3]))
    ]
    if calls:
        written = form.write(calls)
        if rng.random() < 0.5:  # unlike json.dumps
            written = written.replace('": ', '" :  ').replace("}", " }")
        text = text + written if form.begin else written
        if form.begin and rng.random() < 0.2:  # without its marks
            written = "\n".join(
                json.dumps({"name": name, "arguments": values}) for name, values in calls
            )
            text = rng.choice([written, f"```json\n{written}\n```"])
    if rng.random() < 0.1:
        text += "<tool_call>{broken"
    ids = tokenizer.encode(text, special=False)
    if rng.random() < 0.2:
        ids += [rng.randrange(128, 256) for _ in range(3)]  # not UTF-8
    (end,) = tokenizer.eos_ids
    return (*ids, end) if not ids or rng.random() < 0.9 else tuple(ids)


def _answer(prompt: Rendered, ids: tuple[int, ...], form: ToolFormat, text: str) -> Answer:
    parser, builder = ToolCallParser(form, offered={"search", "add"}), AnswerBuilder(0)
    builder.add(parser.push(text), None)
    builder.add(parser.finish(), None)
    zeros = (0.0,) * len(ids)
    completion = Completion(ids, text, zeros, zeros, (0,) * len(ids), "stop")
    return builder.answer(prompt.token_ids, completion)


def _observations(rng: random.Random, answer: Answer) -> list[dict[str, Any]]:
    """Return the messages that the agent adds: a result for every call, or the user's next turn."""
    if not answer.tool_calls:
        return [{"role": "user", "content": rng.choice(["more", "and\nnow?", " x "])}]
    return [
        {"role": "tool", "tool_call_id": call.call_id, "content": rng.choice(["5", "", "[1]"])}
        for call in answer.tool_calls
    ]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", TEMPLATES)
def test_unchanged_conversations_extend_token_for_token(name: str, seed: int) -> None:
    rng, tokenizer = random.Random(f"{name} {seed}"), tokenizer_with(TEMPLATES[name])
    form = format_of(tokenizer)
    num_calls = 0
    for _ in range(CONVERSATIONS):
        memory, path = ConversationMemory(), ()
        messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
        if rng.random() < 0.5:
            messages.insert(0, {"role": "system", "content": "Be brief."})
        tools = TOOLS if rng.random() < 0.8 else None
        kwargs = rng.choice([None, {"enable_thinking": False}, {"enable_thinking": True}])
        for _ in range(rng.randrange(2, 6)):
            prompt = render_prompt(messages, tools, tokenizer, memory, form, kwargs=kwargs)
            assert prompt.token_ids[: len(path)] == path
            assert prompt.breaks == 0
            ids = _sampled(rng, form, tokenizer)
            answer = _answer(prompt, ids, form, tokenizer.decode(ids))
            memory.add(answer.as_message(), Generated(prompt, ids))
            path = prompt.token_ids + ids
            num_calls += len(answer.tool_calls)
            # As sent over the wire by a program in Python or JavaScript.
            wired = json.loads(json.dumps(answer.as_message()))
            for call in wired.get("tool_calls", []) if rng.random() < 0.5 else []:
                arguments = call["function"]["arguments"]
                call["function"]["arguments"] = arguments.replace("2.0}", "2}")
            if not wired["content"] and wired.get("tool_calls"):
                wired["content"] = None
            messages = [*messages, wired, *_observations(rng, answer)]
            if not (answer.text or answer.tool_calls):
                break  # an empty answer cannot be recognized
    assert num_calls > 20


@pytest.mark.parametrize("name", TEMPLATES)
def test_edited_and_dropped_history_forks(name: str) -> None:
    tokenizer = tokenizer_with(TEMPLATES[name])
    form, memory = format_of(tokenizer), ConversationMemory()
    first: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    prompt = render_prompt(first, TOOLS, tokenizer, memory)
    ids = (*tokenizer.encode(form.write([("add", {"n": 1})]), special=False), *tokenizer.eos_ids)
    answer = _answer(prompt, ids, form, tokenizer.decode(ids))
    memory.add(answer.as_message(), Generated(prompt, ids))
    path = prompt.token_ids + ids
    (call,) = answer.tool_calls
    result = {"role": "tool", "tool_call_id": call.call_id, "content": "2"}
    turns = [*first, answer.as_message(), result]
    assert render_prompt(turns, TOOLS, tokenizer, memory).token_ids[: len(path)] == path

    edited = json.loads(json.dumps(turns))
    edited[1]["tool_calls"][0]["function"]["arguments"] = '{"n": 3}'
    forked = render_prompt(edited, TOOLS, tokenizer, memory)
    assert forked.token_ids[: len(path)] != path and forked.replayed == 0

    other_question = [{"role": "user", "content": "ho"}, *turns[1:]]
    spliced = render_prompt(other_question, TOOLS, tokenizer, memory)
    assert spliced.token_ids[: len(path)] != path
    assert (spliced.replayed, spliced.breaks) == (1, 1)

    other_tools = render_prompt(turns, TOOLS[:1], tokenizer, memory)
    assert (other_tools.replayed, other_tools.breaks) == (1, 1)


def test_after_an_edit_the_unedited_beginning_is_kept() -> None:
    tokenizer, memory = tokenizer_with(TEMPLATES["llama3"]), ConversationMemory()
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    paths = []
    for text in ("one ", "two "):
        prompt = render_prompt(messages, None, tokenizer, memory)
        ids = (*tokenizer.encode(text), *tokenizer.eos_ids)
        message = {"role": "assistant", "content": text}
        memory.add(message, Generated(prompt, ids))
        paths.append(prompt.token_ids + ids)
        messages = [*messages, message, {"role": "user", "content": "go on"}]
    messages[2] = {"role": "user", "content": "something else"}
    edited = render_prompt(messages, None, tokenizer, memory)
    assert edited.token_ids[: len(paths[0])] == paths[0]
    assert edited.token_ids[: len(paths[1])] != paths[1]
    assert (edited.replayed, edited.breaks) == (2, 1)
