"""Tests that prompts extend the sampled path token for token, and that messages are checked."""

import json
from typing import Any

import pytest
from coded import raises_coded
from families import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_jax.errors import InvalidValue
from lightning_jax.gateway.prompt.call_syntax import parse_calls
from lightning_jax.gateway.prompt.messages import normalize_messages
from lightning_jax.gateway.prompt.render import (
    ConversationMemory,
    Generated,
    Rendered,
    render_prompt,
)
from lightning_jax.gateway.prompt.tool_formats import HERMES, format_of
from lightning_jax.gateway.prompt.turns import read_prompt
from lightning_jax.models.chat_template import TemplateError, with_defaults
from lightning_jax.models.formats.gguf_vocab import byte_level_bpe, sentencepiece_bpe
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.testing.tiny import CHATML, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.encode("<|im_end|>")[0]
USER = {"role": "user", "content": "hi"}
TOOL_CALL = {"id": "c", "type": "function", "function": {"name": "run", "arguments": '{"a": 1}'}}


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _with_template(template: str) -> Tokenizer:
    return TOKENIZER.with_chat(template=template)


def test_without_memory_it_is_the_templates_text() -> None:
    messages = [{"role": "developer", "content": "be brief"}, USER, _assistant("yo"), USER]
    rendered = render_prompt(messages, None, TOKENIZER)
    assert TOKENIZER.decode(rendered.token_ids, skip_special=False) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\nyo<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert (rendered.replayed, rendered.breaks) == (0, 0)


def test_sampled_ids_come_back_though_their_text_encodes_otherwise() -> None:
    # A vocabulary in which "ab" is one token, but the policy sampled "a" and "b".
    alphabet = [t for t in TOKENIZER._backend.get_vocab() if len(t) == 1]  # not the specials
    assert len(alphabet) == 256
    backend = byte_level_bpe([*sorted(alphabet), "ab"], ["a b"], "gpt-2")
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    vocabulary = backend.get_vocab()
    a, b, ab, end = (vocabulary[token] for token in ("a", "b", "ab", "<|im_end|>"))
    tokenizer = Tokenizer(backend, template=CHATML, eos_ids=[end])
    assert tokenizer.encode("ab") == [ab]
    memory = ConversationMemory()
    first = render_prompt([USER], None, tokenizer, memory)
    memory.add(_assistant("ab"), Generated(first, (a, b, end)))
    second = render_prompt([USER, _assistant("ab"), USER], None, tokenizer, memory)
    assert second.token_ids == (
        *first.token_ids,
        *(a, b, end),  # the end-of-turn token once, though the template writes it too
        *tokenizer.encode("\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"),
    )
    assert (second.replayed, second.breaks) == (1, 0)


# Random bytes are rarely UTF-8. Their text then contains U+FFFD and encodes to other bytes.
responses = st.lists(
    st.tuples(st.lists(st.integers(0, 255), min_size=1, max_size=8), st.booleans()),
    min_size=1,
    max_size=5,
)


@settings(deadline=None, max_examples=60)
@given(responses=responses)
def test_every_prompt_extends_the_last_call(responses: list[tuple[list[int], bool]]) -> None:
    memory = ConversationMemory()
    messages: list[dict[str, Any]] = [USER]
    path: tuple[int, ...] = ()
    for ids, ended in responses:
        prompt = render_prompt(messages, None, TOKENIZER, memory)
        assert prompt.token_ids[: len(path)] == path
        assert prompt.breaks == 0
        sampled = (*ids, END) if ended else tuple(ids)
        text = TOKENIZER.decode(sampled)
        memory.add(_assistant(text), Generated(prompt, sampled))
        path = prompt.token_ids + sampled
        messages = [*messages, _assistant(text), USER]


def test_equal_texts_keep_distinct_ids() -> None:
    memory = ConversationMemory()
    first = render_prompt([USER], None, TOKENIZER, memory)
    memory.add(_assistant("\ufffd"), Generated(first, (200, END)))
    turns = [USER, _assistant("\ufffd"), USER]
    second = render_prompt(turns, None, TOKENIZER, memory)
    memory.add(_assistant("\ufffd"), Generated(second, (201, END)))
    third = render_prompt([*turns, _assistant("\ufffd"), USER], None, TOKENIZER, memory)
    assert third.token_ids[: len(second.token_ids) + 2] == (*second.token_ids, 201, END)
    assert third.token_ids[len(first.token_ids)] == 200
    assert (third.replayed, third.breaks) == (2, 0)


def test_variables_of_the_template_are_part_of_a_calls_identity() -> None:
    tokenizer = _with_template("{{ tone | default('dry') }}: " + CHATML)
    memory, plain, warm = ConversationMemory(), {}, {"tone": "warm"}
    first = render_prompt([USER], None, tokenizer, memory, kwargs=warm)
    assert tokenizer.decode(first.token_ids).startswith("warm: ")
    memory.add(_assistant("\ufffd"), Generated(first, (200, END)))
    turns = [USER, _assistant("\ufffd"), USER]
    same = render_prompt(turns, None, tokenizer, memory, kwargs={"tone": "warm"})
    assert same.token_ids[: len(first.token_ids) + 2] == (*first.token_ids, 200, END)
    assert (same.replayed, same.breaks) == (1, 0)
    other = render_prompt(turns, None, tokenizer, memory, kwargs=plain)
    assert tokenizer.decode(other.token_ids).startswith("dry: ") and 200 in other.token_ids
    assert (other.replayed, other.breaks) == (1, 1)
    defaults = tokenizer.with_chat(template=with_defaults(tokenizer.template or "", warm))
    assert render_prompt([USER], None, defaults).token_ids == first.token_ids
    dry = render_prompt([USER], None, defaults, kwargs={"tone": "dry"})
    assert dry.token_ids == render_prompt([USER], None, tokenizer).token_ids


def test_an_edited_history_forks_and_is_counted() -> None:
    memory = ConversationMemory()
    first = render_prompt([USER], None, TOKENIZER, memory)
    memory.add(_assistant("ok"), Generated(first, (250, 251, END)))
    other_start = [{"role": "user", "content": "ho"}, _assistant("ok"), USER]
    forked = render_prompt(other_start, None, TOKENIZER, memory)
    assert (forked.replayed, forked.breaks) == (1, 1)
    edited = render_prompt([USER, _assistant("ok!"), USER], None, TOKENIZER, memory)
    assert (edited.replayed, edited.breaks) == (0, 1)
    alone = render_prompt([USER, _assistant("ok!"), USER], None, TOKENIZER)
    assert (edited.token_ids, alone.breaks) == (alone.token_ids, 0)
    example = [_assistant("an example"), USER, _assistant("ok!"), USER]  # nobody asked for these
    assert render_prompt([USER, *example], None, TOKENIZER, ConversationMemory()).breaks == 0


SAMPLED: dict[str, Any] = {"path": "a.txt", "count": 1.0, "deep": {"x": True}}


def _call(call_id: Any, name: str = "edit", /, **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "function": {"name": name, "arguments": json.dumps(arguments)}}


def _calls(*calls: dict[str, Any], text: str = "I edit.") -> dict[str, Any]:
    return {"role": "assistant", "content": text, "tool_calls": list(calls)}


FIRST, SECOND = _call("c1", **SAMPLED), _call("c2", "run")
ADDED: dict[str, Any] = {"replace_all": False, **SAMPLED}


def _after_two_calls(returned: dict[str, Any], start: str = "hi") -> tuple[Rendered, bool]:
    """Return the prompt after a reply with two calls, and whether it extends the sampled path."""
    memory, ids = ConversationMemory(), (250, 251, END)
    first = render_prompt([USER], None, TOKENIZER, memory)
    memory.add(_calls(FIRST, SECOND), Generated(first, ids))
    results = [{"role": "tool", "tool_call_id": id, "content": "1"} for id in ("c1", "c2")]
    prompt = render_prompt([_user(start), returned, *results], None, TOKENIZER, memory)
    path = (*first.token_ids, *ids)
    return prompt, prompt.token_ids[: len(path)] == path


@pytest.mark.parametrize(
    "returned",
    [
        _calls(FIRST, SECOND),
        _calls(_call("c1", **ADDED), SECOND),
        _calls(_call("c1", **ADDED | {"count": 1}), _call("c2", "run", cwd="/", env={})),
        _calls(FIRST, _call("c2", "run", cwd=None), text=" I edit.\n"),
    ],
)
def test_a_call_with_added_arguments_is_the_sampled_call(returned: dict[str, Any]) -> None:
    prompt, extends = _after_two_calls(returned)
    assert (extends, prompt.replayed, prompt.breaks) == (True, 1, 0)


CHANGED = {
    "value": _calls(_call("c1", **ADDED | {"path": "b.txt"}), SECOND),
    "truth is no number": _calls(_call("c1", **ADDED | {"deep": {"x": 1}}), SECOND),
    "inner key": _calls(_call("c1", **ADDED | {"deep": {"x": True, "y": 1}}), SECOND),
    "dropped key": _calls(_call("c1", path="a.txt", replace_all=False), SECOND),
    "text": _calls(_call("c1", **ADDED), SECOND, text="I edited."),
    "name": _calls(FIRST, _call("c2", "invalid", tool="run")),
    "order": _calls(SECOND, _call("c1", **ADDED)),
    "fewer": _calls(_call("c1", **ADDED)),
    "more": _calls(_call("c1", **ADDED), SECOND, _call("c3", "run")),
    "twice": _calls(_call("c1", **ADDED), _call("c1", **ADDED)),
    "one unknown id": _calls(_call("c1", **ADDED), _call("c9", "run")),
}


@pytest.mark.parametrize("returned", CHANGED.values(), ids=list(CHANGED))
@pytest.mark.parametrize("start", ["hi", "ho"])
def test_a_changed_call_forks_and_is_counted(returned: dict[str, Any], start: str) -> None:
    prompt, extends = _after_two_calls(returned, start)
    assert (extends, prompt.replayed, prompt.breaks) == (False, 0, 1)


@pytest.mark.parametrize("call_id", ["c8", None, 5, ["c1"]])
def test_a_call_with_another_id_must_be_equal(call_id: Any) -> None:
    second = SECOND | {"id": call_id}
    prompt, extends = _after_two_calls(_calls(_call(call_id, **ADDED), second))
    assert (extends, prompt.replayed, prompt.breaks) == (False, 0, 1)
    prompt, _ = _after_two_calls(_calls(_call(call_id, **ADDED), second), "ho")
    assert (prompt.replayed, prompt.breaks) == (0, 0)  # an example that nobody sampled


@pytest.mark.parametrize(
    "sent",
    [
        {"content": "ok"},
        {"content": "  ok\n"},
        {"content": "<think>\nhm\n</think>\n\nok\n"},
        {"content": "ok", "reasoning_content": "hm"},
        {"content": "ok", "reasoning": "hm"},
    ],
)
def test_a_response_without_its_thought_or_blanks_is_the_response(sent: dict[str, str]) -> None:
    memory, ids = ConversationMemory(), (200, END)
    first = render_prompt([USER], None, TOKENIZER, memory)
    generated = Generated(first, ids)
    memory.add(_assistant("<think>\nhm\n</think>\n\nok\n"), generated)
    again = render_prompt([USER, {"role": "assistant", **sent}, USER], None, TOKENIZER, memory)
    assert again.token_ids[: len(first.token_ids) + 2] == (*first.token_ids, *ids)
    assert (again.replayed, again.breaks) == (1, 0)


def test_a_template_that_rewrites_a_response_is_a_break() -> None:
    content = "{{ m.content + m.content }}"
    tokenizer = _with_template("{% for m in messages %}" + content + "{% endfor %}")
    memory = ConversationMemory()
    memory.add(_assistant("ok"), Generated(Rendered((1,), 0, 0), (2, 3)))
    rendered = render_prompt([USER, _assistant("ok")], None, tokenizer, memory)
    assert rendered.token_ids == render_prompt([USER, _assistant("ok")], None, tokenizer).token_ids
    assert (rendered.replayed, rendered.breaks) == (0, 1)


def test_rendering_leaves_its_input_alone() -> None:
    memory = ConversationMemory()
    memory.add(_assistant("ok"), Generated(Rendered((1,), 0, 0), (2,)))
    memory.add(_assistant(""), Generated(Rendered((1,), 0, 0), (2,)))
    messages = [USER, _assistant("ok"), {"role": "assistant", "tool_calls": [TOOL_CALL]}]
    tokenizer = _with_template(
        "{% for m in messages %}{{ m.content }}{{ m.tool_calls[0].function if m.tool_calls }}"
        "{% endfor %}"
    )
    first = render_prompt(messages, None, tokenizer, memory)
    assert first == render_prompt(messages, None, tokenizer, memory)
    assert messages[1] == _assistant("ok")
    assert messages[2] == {"role": "assistant", "tool_calls": [TOOL_CALL]}
    assert '[{"name": "run", "arguments": {"a": 1}}]' in TOKENIZER.decode(first.token_ids)
    assert memory.recall(_assistant("")) is None and memory.recall(_assistant("unknown")) is None


def test_a_template_without_tools_gets_them_as_text() -> None:
    tools = [{"type": "function", "function": {"name": "run"}}]
    call = {"role": "assistant", "tool_calls": [TOOL_CALL]}
    reply = {"role": "tool", "content": "1", "tool_call_id": "c"}
    text = TOKENIZER.decode(render_prompt([USER, call, reply], tools, TOKENIZER).token_ids)
    assert '<tools>\n{"name": "run"}\n</tools>' in text
    assert text.endswith(
        'hi\nassistant\n<tool_call>[{"name": "run", "arguments": {"a": 1}}]</tool_call>\n'
        "tool\n1\nassistant\n"
    )
    system = {"role": "system", "content": "Be brief."}
    offer = format_of(TOKENIZER).instructions(tools)
    assert f"Be brief.\n\n{offer}" in TOKENIZER.decode(
        render_prompt([system, USER], tools, TOKENIZER).token_ids
    )


def test_a_template_with_tools_gets_them_as_they_are() -> None:
    tools = [{"type": "function", "function": {"name": "run"}}]
    tokenizer = _with_template("{{ tools[0].function.name if tools }}{{ messages[0].content }}")
    assert TOKENIZER.decode(render_prompt([USER], tools, tokenizer).token_ids) == "runhi"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content }}",
        "{% for m in messages[-3:] %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
        "{% for m in messages %}{{ m.content[:2] }}{% endfor %}",
        "{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}",
        "always the same",
    ],
)
def test_a_template_that_drops_a_message_is_refused(template: str) -> None:
    turns = [_user("first"), _assistant("second"), _user("third"), _assistant("4th"), _user("5th")]
    with raises_coded(TemplateError, "drops"):
        render_prompt(turns, None, _with_template(template))


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_content_may_be_text_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert normalize_messages([{"role": "user", "content": parts}]) == [
        {"role": "user", "content": "ab"}
    ]


@pytest.mark.parametrize(
    ("message", "key", "reason"),
    [
        (None, "messages", "empty"),
        ("hi", "messages[1]", "wrong_type"),
        ({"content": "hi"}, "messages[1].role", "unknown"),
        ({"role": "robot", "content": "hi"}, "messages[1].role", "unknown"),
        ({"role": ["user"], "content": "hi"}, "messages[1].role", "unknown"),
        ({"role": "user"}, "messages[1].content", "missing"),
        ({"role": "assistant", "content": None}, "messages[1].content", "missing"),
        ({"role": "user", "content": 5}, "messages[1].content", "wrong_type"),
        ({"role": "user", "content": ["hi"]}, "messages[1].content[0]", "not_text"),
        (
            {"role": "user", "content": [{"type": "image_url"}]},
            "messages[1].content[0]",
            "not_text",
        ),
        (
            {"role": "user", "content": "x", "tool_calls": [TOOL_CALL]},
            "messages[1].tool_calls",
            "wrong_role",
        ),
        ({"role": "assistant", "tool_calls": "run"}, "messages[1].tool_calls", "malformed"),
        (
            {"role": "assistant", "tool_calls": [{"function": {}}]},
            "messages[1].tool_calls",
            "malformed",
        ),
    ],
)
def test_a_bad_message_is_named(message: Any, key: str, reason: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        normalize_messages([USER, message] if message else [])
    assert (caught.value.key, caught.value.reason) == (key, reason)
    assert key in str(caught.value)


@pytest.mark.parametrize("arguments", ["", "  ", "null", None, {}, " {} "])
def test_every_spelling_of_no_arguments_is_an_empty_object(arguments: Any) -> None:
    def ids(**function: Any) -> tuple[int, ...]:
        call = TOOL_CALL | {"function": {"name": "run", **function}}
        asked = {"role": "assistant", "content": None, "tool_calls": [call]}
        return render_prompt([{"role": "user", "content": "?"}, asked], None, TOKENIZER).token_ids

    assert ids(arguments=arguments) == ids(arguments="{}") == ids()
    written = json.dumps({"name": "f", "arguments": arguments})
    assert parse_calls(written, HERMES) == [("f", "{}")]


def _gemma() -> Tokenizer:
    """Return a SentencePiece vocabulary of bytes, with Gemma's marks and turns."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    types = [3] * len(special) + [6] * 256 + [1]
    backend = sentencepiece_bpe(tokens, types, [0.0] * len(tokens), "<unk>", has_prefix=False)
    backend.add_special_tokens(special)
    template = FAMILIES["Gemma 3"].template.replace("<|im_start|>", "<start_of_turn>")
    return Tokenizer(
        backend,
        template="{{ bos_token }}" + template.replace("<|im_end|>", "<end_of_turn>"),
        eos_ids=[1],
        special_tokens={"bos_token": "<bos>", "eos_token": "<eos>"},
    )


def test_gemmas_turns_hold_the_system_message_tools_and_results() -> None:
    tokenizer, memory = _gemma(), ConversationMemory()
    end = tokenizer.encode("<end_of_turn>")[0]
    assert tokenizer.eos_ids == {1, end}
    turns = [{"role": "system", "content": "be brief"}, USER]
    tools = [{"type": "function", "function": {"name": "run", "parameters": {}}}]
    first = render_prompt(turns, tools, tokenizer, memory)
    text = tokenizer.decode(first.token_ids, skip_special=False)
    assert text.startswith("<bos><start_of_turn>user\nbe brief\n\n")
    assert text.endswith("\n\nhi<end_of_turn>\n<start_of_turn>model\n") and '"run"' in text
    assert [role for role, _ in read_prompt(first.token_ids, tokenizer)] == ["user"]
    call = {"role": "assistant", "content": "", "tool_calls": [TOOL_CALL]}
    sampled = (*tokenizer.encode('<tool_call>{"name": "run", "arguments": {"a": 1}}'), end)
    memory.add(call, Generated(first, sampled))
    result = {"role": "tool", "tool_call_id": "c", "content": "é 2"}
    second = render_prompt([*turns, call, result, USER], tools, tokenizer, memory)
    more = "\n<start_of_turn>user\n<tool_response>\né 2\n</tool_response>\n\nhi<end_of_turn>\n"
    assert second.token_ids == (
        *first.token_ids,
        *sampled,
        *tokenizer.encode(f"{more}<start_of_turn>model\n"),
    )
    assert (second.replayed, second.breaks) == (1, 0)
