"""Tests of parsing tool calls: every format, any split of the text, and text that is not a call."""

import itertools
import json
import pickle
from collections.abc import Collection
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_jax.gateway.prompt.tool_calls import (
    CallArguments,
    CallStart,
    Piece,
    TextPiece,
    ToolCallParser,
    parse_calls,
)
from lightning_jax.gateway.prompt.tool_formats import (
    FORMATS,
    HERMES,
    LLAMA3,
    SMOLLM,
    ToolFormat,
    format_of,
)
from lightning_jax.models.config import ModelConfig
from lightning_jax.models.tiny_tokenizer import tiny_tokenizer

CALLS: list[tuple[str, Any]] = [
    ("f", {"a": 1, "b": ["}", '"', "\\"]}),
    ("g", {"deep": {"x": {"y": "ü{"}}}),
]


def _run(
    text: str,
    form: ToolFormat,
    cuts: list[int],
    guaranteed: bool = False,
    offered: Collection[str] | None = None,
) -> list[Piece]:
    parser = ToolCallParser(form, guaranteed=guaranteed, offered=offered)
    offsets = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = []
    for start, end in itertools.pairwise(offsets):
        pieces += parser.push(text[start:end])
    return pieces + parser.finish()


def _whole(pieces: list[Piece]) -> tuple[str, list[tuple[str, Any]]]:
    """Return the text and the calls, with arguments decoded."""
    text, calls = "", []
    for piece in pieces:
        match piece:
            case TextPiece():
                text += piece.text
            case CallStart():
                assert piece.index == len(calls)
                calls.append((piece.name, ""))
            case CallArguments():
                name, arguments = calls[piece.index]
                calls[piece.index] = (name, arguments + piece.text)
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


cuts = st.lists(st.integers(0, 400), max_size=30)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("guaranteed", [False, True])
@given(cuts=cuts)
def test_what_a_format_writes_it_reads(form: ToolFormat, guaranteed: bool, cuts: list[int]) -> None:
    text = form.write(CALLS)
    assert _whole(_run(text, form, cuts, guaranteed)) == ("", CALLS)


@pytest.mark.parametrize("form", [HERMES, SMOLLM], ids=["hermes", "smollm"])
@given(cuts=cuts)
def test_text_around_calls_stays(form: ToolFormat, cuts: list[int]) -> None:
    text = f"I look it up: a < b <tool_.\n{form.write(CALLS)}\n"
    assert _whole(_run(text, form, cuts)) == ("I look it up: a < b <tool_.\n", CALLS)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n{broken\n</tool_call>",
        "<tool_call>{}</tool_call>",
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
        '<tool_call>{"name": "f"',
        "<tool_call>",
        "a <tool_call b",
        "plain",
        "",
    ],
)
@given(cuts=cuts)
def test_a_malformed_call_is_text_and_counted(text: str, cuts: list[int]) -> None:
    assert _whole(_run(text, HERMES, cuts)) == (text, [])
    parser = ToolCallParser(HERMES)
    parser.push(text)
    parser.finish()
    assert parser.malformed == ("<tool_call>" in text)


def test_a_call_whose_closing_mark_is_missing_is_a_call() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}'
    assert _whole(_run(text, HERMES, [])) == ("", [("f", {"a": 1})])


@given(cuts=cuts)
def test_bare_json_is_a_call_only_as_the_whole_answer(cuts: list[int]) -> None:
    call = '{"name": "f", "parameters": {"a": 1}}'
    assert _whole(_run(call, LLAMA3, cuts)) == ("", [("f", {"a": 1})])
    assert _whole(_run(f"<|python_tag|>{call}", LLAMA3, cuts)) == ("", [("f", {"a": 1})])
    assert _whole(_run(f"Say {call}", LLAMA3, cuts)) == (f"Say {call}", [])
    assert _whole(_run("[1, 2]", LLAMA3, cuts)) == ("[1, 2]", [])
    python = '[f(a=1, b="x]"), pkg.g()]'
    assert _whole(_run(python, LLAMA3, cuts)) == ("", [("f", {"a": 1, "b": "x]"}), ("pkg.g", {})])


@pytest.mark.parametrize(
    "text",
    [
        "[f(1)]",
        "[f(**{})]",
        "[f(a=open('x'))]",
        "[f(a={1, 2})]",
        "[(lambda: 1)(a=1)]",
        "[f(a='\\d')]x",
        "[" * 5000,
        '{"name": "f", "parameters": {"a": 1}} and more',
    ],
)
def test_what_is_no_call_is_never_one(text: str) -> None:
    assert parse_calls(text, LLAMA3) == []


def test_guaranteed_arguments_leave_as_they_are_made() -> None:
    parser = ToolCallParser(HERMES, guaranteed=True)
    assert parser.push('<tool_call>\n{"name": "f", "arguments": ') == []
    assert parser.push('{"a') == [CallStart(0, "f"), CallArguments(0, '{"a')]
    assert parser.push('": "}') == [CallArguments(0, '": "}')]
    assert parser.push('"}}') == [CallArguments(0, '"}')]
    assert parser.push("\n</tool_call>") == [] == parser.finish()
    assert parser.malformed == 0


def test_a_guaranteed_call_that_the_limit_cuts_keeps_what_there_is() -> None:
    pieces = _run('<tool_call>[{"name": "f", "arguments": {"a": "unfin', SMOLLM, [20, 44], True)
    assert pieces[0] == CallStart(0, "f")
    text = "".join(piece.text for piece in pieces[1:] if isinstance(piece, CallArguments))
    assert text == '{"a": "unfin'


def test_arguments_may_be_a_json_string() -> None:
    assert parse_calls('{"name": "f", "arguments": "{\\"a\\": 1}"}', HERMES) == [("f", '{"a": 1}')]
    assert parse_calls('{"name": "f"}', HERMES) == [("f", "{}")]


@pytest.mark.parametrize("text", ['{"name": "Alice", "age": 3}', "[Alice(age=3)]"])
def test_without_marks_only_a_tools_name_makes_a_call(text: str) -> None:
    for offered, found in (({"f"}, (text, [])), ({"Alice"}, "call"), (None, "call")):
        parser = ToolCallParser(LLAMA3, offered=offered)
        pieces = [*parser.push(text), *parser.finish()]
        if found == "call":
            assert [piece.name for piece in pieces if isinstance(piece, CallStart)] == ["Alice"]
        else:
            assert (_whole(pieces), parser.malformed) == (found, 0)


@pytest.mark.parametrize("form", [HERMES, SMOLLM, LLAMA3], ids=["hermes", "smollm", "llama3"])
def test_calls_that_a_request_does_not_allow_are_text_and_counted(form: ToolFormat) -> None:
    one, only_f = {"at_most": 1}, {"allowed": ("f",)}
    for rules in (one, only_f):
        parser = ToolCallParser(form, offered={"f", "g"}, **rules)  # type: ignore[arg-type]
        pieces = [*parser.push(form.write(CALLS)), *parser.finish()]
        text, calls = _whole(pieces)
        assert calls in ([], CALLS[:1]) and '"g"' in text and parser.malformed == 1
    parser = ToolCallParser(form, at_most=1, allowed=("f",))
    assert _whole([*parser.push(form.write(CALLS[:1])), *parser.finish()]) == ("", CALLS[:1])


@pytest.mark.parametrize("value", [r'"\ud83d"', "1e999", "NaN", "[" * 200 + "]" * 200])
def test_arguments_that_no_client_can_send_back_are_no_call(value: str) -> None:
    assert parse_calls(f'{{"name": "f", "arguments": {{"a": {value}}}}}', LLAMA3) == []
    plain = value.replace("NaN", "-1e999")
    assert parse_calls(f"[f(a={plain})]", LLAMA3) == []


CODER = [  # as Qwen2.5-Coder-0.5B-Instruct writes a call, without the marks of its template
    '{"name": "f", "arguments": {"a": 1}}',
    '\n{"name": "f", "arguments": {"a": 1}}\n',
    '```json\n{"name": "f", "arguments": {"a": 1}}\n```',
    '```\n{"name": "f", "arguments": {"a": 1}}\n```\n',
]


@pytest.mark.parametrize("form", [HERMES, SMOLLM], ids=["hermes", "smollm"])
@pytest.mark.parametrize("text", CODER)
@given(cuts=cuts)
def test_calls_without_marks_are_calls_of_offered_tools(
    text: str, form: ToolFormat, cuts: list[int]
) -> None:
    assert _whole(_run(text, form, cuts, offered={"f", "g"})) == ("", [("f", {"a": 1})])
    assert _whole(_run(text, form, cuts, offered={"g"})) == (text, [])  # an answer in JSON
    two = f"{CODER[0]}\n{CODER[0].replace('f', 'g', 1)}"
    assert [name for name, _ in _whole(_run(two, form, cuts, offered={"f", "g"}))[1]] == ["f", "g"]


@pytest.mark.parametrize(
    "text",
    [
        f"Sure: {CODER[0]}",
        f"{CODER[0]} and more",
        '{"name": "f"}',
        '{"name": "f", "arguments": [1]}',
        '{"a": {"name": "f"}}',
        "```python\nf(a=1)\n```",
        '```json\n{"rows": [1, 2]}\n```',
        "``",
        "{",
        "",
    ],
)
@given(cuts=cuts)
def test_an_answer_that_is_more_than_calls_stays_text(text: str, cuts: list[int]) -> None:
    assert _whole(_run(text, HERMES, cuts, offered={"f"})) == (text, [])


def test_marks_win_over_an_answer_that_begins_like_a_call() -> None:
    text = '{"note": 1}\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert _whole(_run(text, HERMES, [3, 14], offered={"f"})) == ('{"note": 1}\n', [("f", {})])


def test_unmarked_calls_that_a_request_does_not_allow_are_counted() -> None:
    parser = ToolCallParser(HERMES, offered={"f", "g"}, allowed=("g",))
    pieces = [*parser.push(CODER[0]), *parser.finish()]
    assert (_whole(pieces), parser.malformed) == ((CODER[0], []), 1)


def test_text_is_sent_at_once_where_it_cannot_be_a_call() -> None:
    parser = ToolCallParser(HERMES, offered={"f"})
    assert parser.push("```sql\nSELECT") == [TextPiece("```sql\nSELECT")]


def test_a_format_can_be_named() -> None:
    named = get_args(get_args(get_type_hints(ModelConfig)["tool_format"])[0])
    assert set(named) == FORMATS.keys()
    tokenizer = tiny_tokenizer()
    assert format_of(tokenizer) is SMOLLM
    chosen = pickle.loads(pickle.dumps(tokenizer.with_chat(tool_format="llama3")))
    assert format_of(chosen) is LLAMA3
