"""Tests of parsing tool calls: every format, any split of the text, and text that is not a call."""

import itertools
import json
import pickle
from collections.abc import Collection
from typing import Any, get_args, get_type_hints

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from lightning_jax.engine.response import Response, SampledToken
from lightning_jax.engine.types import SamplingParams
from lightning_jax.gateway.prompt.call_syntax import JsonStrings, parse_calls
from lightning_jax.gateway.prompt.tool_calls import (
    CallArguments,
    CallStart,
    Piece,
    TextPiece,
    ToolCallParser,
)
from lightning_jax.gateway.prompt.tool_formats import (
    FORMATS,
    GRANITE,
    HERMES,
    LLAMA3,
    MISTRAL,
    PHI,
    SMOLLM,
    ToolFormat,
    format_of,
    mark_ids,
    open_thought,
)
from lightning_jax.models.config import ModelConfig
from lightning_jax.models.formats.find import tiny_tokenizer
from lightning_jax.models.tokenizer import StreamDecoder, Tokenizer

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


@pytest.mark.parametrize("form", [HERMES, SMOLLM, PHI], ids=["hermes", "smollm", "phi"])
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


@pytest.mark.parametrize("form", [MISTRAL, GRANITE], ids=["mistral", "granite"])
@given(cuts=cuts)
def test_calls_without_a_closing_mark_last_until_the_end(form: ToolFormat, cuts: list[int]) -> None:
    call = form.write(CALLS)
    assert _whole(_run(f"Let me see.\n{call}", form, cuts)) == ("Let me see.\n", CALLS)
    parser = ToolCallParser(form)
    assert _whole([*parser.push(f"{call} Done."), *parser.finish()]) == (f"{call} Done.", [])
    assert parser.malformed == 1


# Answers in the form that the model cards show, and the text and the calls that a client gets.
SHOWN = [
    (
        PHI,
        '<|tool_call|>[{"name": "match", "arguments": {"team": "FC"}}, {"name": "now"}]'
        "<|/tool_call|>",
        ("", [("match", {"team": "FC"}), ("now", {})]),
    ),
    (PHI, '<|tool_call|>[{"name": "f", "parameters": {"a": 1}}]', ("", [("f", {"a": 1})])),
    (
        GRANITE,
        '<|tool_call|>[{"name": "f", "arguments": {"a": "<|tool_call|>"}}]',
        ("", [("f", {"a": "<|tool_call|>"})]),
    ),
    (  # Granite 3.1
        HERMES,
        '<tool_call>[{"name": "f", "arguments": {"a": 1}}]',
        ("", [("f", {"a": 1})]),
    ),
    (  # SmolLM3 with thoughts
        HERMES,
        '<think>\nf?\n</think>\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        ("<think>\nf?\n</think>\n", [("f", {})]),
    ),
    (PHI, "<|tool_call|>[]<|/tool_call|>", ("<|tool_call|>[]<|/tool_call|>", [])),
]


@pytest.mark.parametrize(("form", "answer", "expected"), SHOWN)
@given(cuts=cuts)
def test_calls_as_model_cards_show_them_are_parsed(
    form: ToolFormat, answer: str, expected: tuple[str, list[tuple[str, Any]]], cuts: list[int]
) -> None:
    assert _whole(_run(answer, form, cuts)) == expected


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
    '[\n  {\n    "name": "f",\n    "arguments": {"a": 1}\n  }\n]',
    '```json\n[{"name": "f", "arguments": {"a": 1}}]\n```',
]


@pytest.mark.parametrize("form", [HERMES, SMOLLM, PHI], ids=["hermes", "smollm", "phi"])
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
        '[{"name": "f", "arguments": {}}, 2]',
        '[{"name": "f", "arguments": {}}',
        "[1, 2]",
        "[]",
        "[ ",
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
    signs = {
        "[TOOL_CALLS] [{{ calls }}]": MISTRAL,
        "<|tool_call|>{{ calls }}<|/tool_call|>": PHI,
        "<|tool_call|>{{ calls }}<|end_of_text|>": GRANITE,
        "<tool_call>\n{{ call }}\n</tool_call>": HERMES,  # SmolLM3 and Granite 4
    }
    for template, form in signs.items():
        assert format_of(tokenizer.with_chat(template=template)) is form


BLANK = ["\n", "\n\n\n", " ", "    "]
TEXTS = ["I called f.", "1. wait", "a < b", "<tool_", "</tool_call", "</think>", "<think", "{x}"]
THOUGHTS = ["<think>\nMaybe {call}? No.\n</think>", "<think></think>", "[THINK]\n{call}[/THINK]"]
VALUES = ["</tool_call>", "<tool_call>", "<think>", "</think>", '"', "\\", "}{", "ü", "x\n<think>"]

arguments = st.dictionaries(st.sampled_from("ab"), st.lists(st.sampled_from(VALUES)).map("".join))
named = st.tuples(st.sampled_from("fg"), arguments)
parts = st.lists(
    st.one_of(
        st.lists(st.sampled_from(BLANK + TEXTS), min_size=1).map("".join),
        st.sampled_from(THOUGHTS),
        named,
    ),
    max_size=6,
)


def _expected(
    answer: list[str | tuple[str, Any]], form: ToolFormat
) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return an answer as the model writes it, and the text and calls that a client gets."""
    sampled = shown = held = ""
    after_call = False
    calls: list[tuple[str, Any]] = []
    for part in answer:
        if isinstance(part, tuple):
            sampled += form.write([part])
            shown, held = shown + held * bool(not after_call or held.strip()), ""
            after_call = True
            calls.append(part)
        else:
            if part.startswith(("<think>", "[THINK]")):
                part = part.replace("{call}", form.write([("f", {})]))
                part = f"\n{part}"  # at the start of a line
                shown, held, after_call = shown + held + part, "", False
            else:
                held += part
            sampled += part
    return sampled, shown + held * bool(not after_call or held.strip()), calls


@pytest.mark.parametrize("form", [HERMES, SMOLLM, PHI], ids=["hermes", "smollm", "phi"])
@given(answer=parts, cuts=cuts)
def test_any_split_gives_the_same_and_no_byte_is_lost(
    form: ToolFormat, answer: list[str | tuple[str, Any]], cuts: list[int]
) -> None:
    sampled, shown, calls = _expected(answer, form)
    assert _whole(_run(sampled, form, cuts, offered={"f", "g"})) == (shown, calls)
    letters = list(range(len(sampled) + 1))
    assert _whole(_run(sampled, form, letters, offered={"f", "g"})) == (shown, calls)


BROKEN = ['{"name": "f, "arguments": {}}', '{"a": "', "", '\\"', '{"name": "f"} x', '"<tool_call>"']


@pytest.mark.parametrize("body", BROKEN)
@given(cuts=cuts)
def test_a_broken_call_ends_at_its_first_mark_and_hides_no_later_one(
    body: str, cuts: list[int]
) -> None:
    broken, call = f"<tool_call>{body}</tool_call>", HERMES.write([("f", {"a": 1})])
    assert _whole(_run(broken, HERMES, cuts)) == (broken, [])
    assert _whole(_run(f"{broken} {call}\n", HERMES, cuts)) == (f"{broken} ", [("f", {"a": 1})])
    assert _whole(_run(f"{call} {broken}\n", HERMES, cuts)) == (f" {broken}\n", [("f", {"a": 1})])


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@given(cuts=cuts)
def test_calls_in_a_thought_are_text_and_those_after_it_are_calls(
    form: ToolFormat, cuts: list[int]
) -> None:
    rejected, call = form.write([("g", {})]), form.write([("f", {"a": 1})])
    thought = f"<think>\nMaybe\n{rejected}? No.\n</think>"
    found = _whole(_run(f"{thought}{call}", form, cuts, offered={"f", "g"}))
    assert found == (thought, [("f", {"a": 1})])
    # The prompt may have opened it, and the answer may not close it.
    _, _, rest = thought.partition("<think>")
    for text, wanted in ((f"{rest}{call}", (rest, [("f", {"a": 1})])), (rejected, (rejected, []))):
        parser = ToolCallParser(form, thought_end="</think>")
        pieces = [piece for letter in text for piece in parser.push(letter)]
        assert _whole(pieces + parser.finish()) == wanted
        assert parser.malformed == 0


@pytest.mark.parametrize("text", CODER)
@given(cuts=cuts)
def test_unmarked_calls_may_follow_a_thought(text: str, cuts: list[int]) -> None:
    thought = "<think>\nhm\n</think>"
    assert _whole(_run(thought + text, HERMES, cuts, offered={"f"})) == (thought, [("f", {"a": 1})])


def test_a_mark_within_a_line_begins_no_thought() -> None:
    text = f"Write <think> first.{HERMES.write([('f', {})])}"
    assert _whole(_run(text, HERMES, [])) == ("Write <think> first.", [("f", {})])


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@given(length=st.integers(0, 90))
def test_a_guaranteed_call_that_is_cut_early_is_text_or_a_call(
    form: ToolFormat, length: int
) -> None:
    whole = form.write([("f", {"a": "</tool_call>"}), ("g", {})])
    sampled = whole[:length]
    pieces = _run(sampled, form, list(range(90)), guaranteed=True)
    text = "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))
    assert sampled.endswith(text)  # the beginning of a call without its name
    if '{"' in sampled:
        assert text or any(isinstance(piece, CallStart) for piece in pieces)


@given(cuts=cuts)
def test_a_list_of_json_calls_is_calls_where_python_is_read_too(cuts: list[int]) -> None:
    text = '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'
    assert _whole(_run(text, LLAMA3, cuts, offered={"f", "g"})) == (
        "",
        [("f", {"a": 1}), ("g", {})],
    )
    answer = '[{"name": "Alice", "age": 3}]'
    assert _whole(_run(answer, LLAMA3, cuts, offered={"f"})) == (answer, [])


def _with_marks(special: bool) -> Tokenizer:
    """Return a tokenizer in which marks are tokens."""
    backend = tokenizers.Tokenizer.from_str(tiny_tokenizer().to_json())
    marks = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "<other>"]
    backend.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in marks])
    return Tokenizer(backend, eos_ids=tiny_tokenizer().eos_ids)


def _respond(
    ids: list[int], tokenizer: Tokenizer, form: ToolFormat, num_together: int
) -> tuple[str, list[tuple[str, Any]]]:
    """Return the text and calls of sampled tokens, whose text is read in larger pieces."""
    sampling = SamplingParams(shown_ids=mark_ids(form, tokenizer))
    decoder = StreamDecoder(tokenizer, sampling.shown_ids)
    response = Response(decoder, tokenizer.eos_ids, sampling, len(ids))
    texts = []
    for token_id in ids:
        response.push(SampledToken(token_id, 0.0, 0.0, 0.0, 0))
        texts.append(response.chunk().text)
    assert list(response.token_ids) == ids
    parser = ToolCallParser(form, offered={"f", "g"})
    groups = range(0, len(texts), num_together)
    pieces = [p for at in groups for p in parser.push("".join(texts[at : at + num_together]))]
    return _whole(pieces + parser.finish())


@pytest.mark.parametrize("special", [False, True], ids=["plain", "special"])
@given(answer=parts, num_together=st.integers(1, 50))
def test_marks_may_be_special_tokens(
    special: bool, answer: list[str | tuple[str, Any]], num_together: int
) -> None:
    tokenizer = _with_marks(special)
    sampled, shown, calls = _expected(answer, HERMES)
    ids = [*tokenizer.encode(sampled), *tokenizer.eos_ids]
    assert _respond(ids, tokenizer, HERMES, num_together) == (shown, calls)


def test_other_special_tokens_stay_hidden() -> None:
    tokenizer = _with_marks(special=True)
    call = '{"name": "f", "parameters": {"a": 1}}'
    ids = tokenizer.encode(f"<other><|python_tag|>{call}<|im_end|>")
    assert _respond(ids, tokenizer, LLAMA3, 1) == ("", [("f", {"a": 1})])
    ids = tokenizer.encode("a<other>b <tool_call>")
    assert _respond(ids, tokenizer, HERMES, 1) == ("ab <tool_call>", [])


@pytest.mark.parametrize("special", [False, True], ids=["plain", "special"])
def test_a_prompt_may_end_in_a_thought(special: bool) -> None:
    for tokenizer in (tiny_tokenizer(), _with_marks(special)):
        for prompt, end in (
            ("<|im_start|>assistant\n<think>\n", "</think>"),
            ("[THINK]", "[/THINK]"),
            ("<think>\n\n</think>\n\n", ""),
            ("<think> aloud", ""),
            ("", ""),
        ):
            assert open_thought(tokenizer.encode(prompt), tokenizer) == end


@given(
    text=st.lists(st.sampled_from(['"', "\\", "a", "{", "é"]), max_size=20).map("".join),
    places=st.lists(st.integers(0, 20)),
)
def test_strings_of_json_are_found_in_pieces(text: str, places: list[int]) -> None:
    strings = JsonStrings()
    for place in sorted(place for place in places if place <= len(text)):
        is_open = escaped = False
        for character in text[:place]:
            if not is_open and character == "\\":
                return  # not JSON: nothing is asked after it
            is_open ^= character == '"' and not escaped
            escaped = is_open and character == "\\" and not escaped
        assert strings.contain(text[:place], place) == strings.contain(text, place) == is_open


SOUP = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "[THINK]",
        "<|python_tag|>",
        "```json\n",
    ),
    *('{"name": "f", "arguments": {}}', '{"name": "f", "parameters": {"a": "', '"}}', "[f(a=1)]"),
    *("[", "]", "{", '"', "\\", "\n", " ", "```", "json\n", "a", "<", "; ", '{"name": "x"}'),
]


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("guaranteed", [False, True])
@given(text=st.lists(st.sampled_from(SOUP), max_size=14).map("".join), cuts=cuts)
def test_any_text_is_read_the_same_in_every_split(
    form: ToolFormat, guaranteed: bool, text: str, cuts: list[int]
) -> None:
    def read(cuts: list[int]) -> tuple[str, list[tuple[str, str]]]:
        shown, calls = "", []
        for piece in _run(text, form, cuts, guaranteed, {"f"}):
            match piece:
                case TextPiece():
                    shown += piece.text
                case CallStart():
                    calls.append((piece.name, ""))
                case CallArguments():
                    name, before = calls[piece.index]
                    calls[piece.index] = (name, before + piece.text)
        return shown, calls

    whole = read([])
    assert whole == read(cuts) == read(list(range(len(text) + 1)))
    if not (whole[1] or guaranteed):
        assert whole[0] == text
