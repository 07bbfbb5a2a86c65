"""Tests of grammars: allowed tokens, forced tokens, and valid output."""

import asyncio
import enum
import json
from collections.abc import Iterator
from typing import Annotated, Literal

import numpy as np
import pytest
import tokenizers
from pydantic import BaseModel, ConfigDict, Field

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.engine.grammar.compiler import (
    KEPT_FORMATS,
    GrammarCompiler,
    GrammarError,
    Matcher,
    grammar,
    json_schema,
    literal,
    one_of,
    repeat,
    sequence,
)
from lightning_jax.engine.loop import EngineLoop
from lightning_jax.engine.types import SamplingParams
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.testing.tiny import tiny_tokenizer

TINY = tiny_tokenizer()
EOS = min(TINY.eos_ids)
COMPILER = GrammarCompiler(TINY)


def open_matcher(compiler: GrammarCompiler, grammar_text: str) -> Matcher:
    """Return a matcher at the start of a grammar that compiles."""
    compiler.check(grammar_text)
    return compiler.open(grammar_text)


def allowed_ids(matcher: Matcher) -> list[int]:
    """Return the ids of the tokens that may come next."""
    return np.flatnonzero(np.unpackbits(matcher.packed(), bitorder="little")).tolist()


def accepts(text: str, grammar_text: str) -> bool:
    """Return True if the grammar accepts the whole text, token by token."""
    matcher = open_matcher(COMPILER, grammar_text)
    for token_id in [*TINY.encode(text, special=False), EOS]:
        if token_id not in allowed_ids(matcher):
            return False
        matcher.push(token_id)
    return True


def allowed_text(matcher: Matcher) -> set[str]:
    return {TINY.decode([i], skip_special=False) for i in allowed_ids(matcher)}


def merging_tokenizer() -> Tokenizer:
    """Return a tokenizer with bytes, the merge "ab", and an added token that is not special."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, "ab"])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("a", "b")]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_tokens([tokenizers.AddedToken("<end>", special=True, normalized=False)])
    backend.add_tokens([tokenizers.AddedToken("<tool_call>", special=False, normalized=False)])
    return Tokenizer(backend, eos_ids=[257], special_tokens={"eos_token": "<end>"})


def test_a_matcher_shows_what_may_come_and_what_must():
    matcher = open_matcher(COMPILER, 'start: "ab" ("x" | "y") "z"')
    assert allowed_text(matcher) == {"a"} and matcher.forced == TINY.encode("a")[0]
    for token_id in TINY.encode("ab"):
        matcher.push(token_id)
    assert allowed_text(matcher) == {"x", "y"} and matcher.forced is None
    for token_id in TINY.encode("yz"):
        matcher.push(token_id)
    assert allowed_text(matcher) == {"<|im_end|>"} and matcher.forced == EOS


def test_fixed_text_is_forced_in_the_tokenizers_own_tokens():
    tokenizer = merging_tokenizer()
    compiler = GrammarCompiler(tokenizer)
    matcher = open_matcher(compiler, grammar(literal("<tool_call>ab")))
    assert matcher.forced == 258  # "<tool_call>"
    matcher.push(258)
    assert matcher.forced == tokenizer.token_id("ab")  # not "a"
    free = open_matcher(compiler, "start: /[ab]+/")
    assert allowed_ids(free) == sorted(
        [*tokenizer.encode("a"), *tokenizer.encode("b"), *tokenizer.encode("ab")]
    )


def test_an_added_token_in_a_literal_comes_as_that_token():
    tokenizer = merging_tokenizer()
    compiler = GrammarCompiler(tokenizer)
    text = "<tool_call>\n"
    choice = one_of(literal(text, tokenizer), literal("x"))
    matcher = open_matcher(compiler, grammar(choice))
    expected = [*tokenizer.encode("x"), 258]
    assert allowed_ids(matcher) == expected  # no separate "<"
    special = literal("a<|im_start|>b<|im_end|>", TINY)
    assert special == '("a" <[257]> "b" <[258]>)'
    matcher = open_matcher(COMPILER, grammar(special))
    for token_id in TINY.encode("a<|im_start|>b<|im_end|>"):
        assert matcher.forced == token_id
        matcher.push(token_id)


def test_the_text_of_a_special_token_in_a_schema_is_ordinary_characters():
    spelled = TINY.encode('"<|im_end|>"', special=False)
    matcher = open_matcher(COMPILER, grammar(json_schema({"const": "<|im_end|>"})))
    for token_id in spelled:
        assert matcher.forced == token_id
        matcher.push(token_id)
    assert matcher.forced == EOS


FORMATS = ("password", "binary", "byte", "path", "uri-reference", "regex", "int32", "", 3, None)


@pytest.mark.parametrize("form", FORMATS)
def test_an_unknown_format_is_an_annotation_wherever_it_stands(form):
    text = {"type": "string", "format": form}
    named = {"format": {"type": "string", "enum": ["x"], "format": form}}  # a property's name
    whole = {
        "type": "object",
        "properties": {"a": text, "b": {"type": "array", "items": text}, **named},
        "required": ["a", "b", "format"],
        "$defs": {"format": {"anyOf": [text, {"enum": [{"format": form}]}]}},
    }
    for schema in (text, {"anyOf": [text, {"type": "null"}]}):
        assert accepts('"x y"', grammar(json_schema(schema)))
    assert accepts('{"a": "", "b": ["x"], "format": "x"}', grammar(json_schema(whole)))
    assert not accepts('{"a": "", "b": ["x"], "format": "y"}', grammar(json_schema(whole)))
    assert accepts(json.dumps({"format": form}), grammar(json_schema({"const": {"format": form}})))


def test_the_formats_that_are_kept_bind():
    for form in KEPT_FORMATS:
        assert not accepts('"no, never"', grammar(json_schema({"type": "string", "format": form})))


def test_the_mask_has_the_models_width():
    wide = open_matcher(GrammarCompiler(TINY, 300), "start: /[^a]/")
    assert wide.packed().shape == (38,) and max(allowed_ids(wide)) < 259
    with pytest.raises(GrammarError) as caught:
        open_matcher(GrammarCompiler(TINY, 10), 'start: "a"').packed()  # "a" has id 64
    assert caught.value.reason == "dead_end"


@pytest.mark.parametrize("text", ['a"b\\c', "\n\t\x00\x7f", "é€😀", "// no # comment", "", "{}|*"])
def test_any_text_can_be_a_literal(text):
    assert accepts(text + "!", grammar(sequence(literal(text), literal("!"))))


def test_building_blocks_make_tool_calls():
    weather = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    clock = {"type": "object", "properties": {}, "additionalProperties": False}

    def call(name: str, schema: dict) -> str:
        head = literal(f'<tool_call>\n{{"name": "{name}", "arguments": ')
        return sequence(head, json_schema(schema), literal("}\n</tool_call>"))

    either = one_of(call("weather", weather), call("clock", clock))
    calls = grammar(repeat(either, literal("\n"), at_most=2))
    paris = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    now = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    assert accepts(paris, calls)
    assert accepts(f"{now}\n{paris}", calls)
    assert not accepts(f"{now}\n{now}\n{now}", calls)
    assert not accepts(f"{now}{now}", calls)
    assert not accepts("", calls)
    assert not accepts(now.replace("clock", "time"), calls)


def test_repetitions_keep_their_bounds():
    comma = literal(",")
    for least, most, right in (
        (1, None, {1, 2, 5}),
        (0, 2, {0, 1, 2}),
        (2, 2, {2}),
        (0, 0, {0}),
        (1, 1, {1}),
    ):
        language = grammar(
            sequence(repeat(literal("a"), comma, at_least=least, at_most=most), '"!"')
        )
        fits = {n for n in (0, 1, 2, 5) if accepts(",".join("a" * n) + "!", language)}
        assert fits == right


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("start: nothing", '"nothing"'),
        ('start: "a', ""),
        (grammar(json_schema({"type": "objct"})), "objct"),
        (grammar(json_schema({"type": "array", "uniqueItems": True})), "uniqueItems"),
        (grammar(json_schema({"type": "string", "pattern": "(?=a)b"})), "regex"),
        (grammar(json_schema({"$ref": "#/$defs/none"})), "none"),
    ],
)
def test_a_grammar_that_does_not_compile_gets_one_sentence(text, name):
    with pytest.raises(GrammarError) as raised:
        open_matcher(COMPILER, text)
    assert raised.value.reason == "invalid"
    assert name in str(raised.value) and "\n" not in str(raised.value)


def test_a_token_that_is_not_allowed_is_refused():
    matcher = open_matcher(COMPILER, 'start: "a"')
    matcher.push(65)
    with pytest.raises(GrammarError) as caught:
        matcher.packed()
    assert caught.value.reason == "token_does_not_fit"
    assert "65" in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(GrammarError) as caught:
        open_matcher(GrammarCompiler(Tokenizer(merging_tokenizer()._backend)), 'start: "a"')
    assert caught.value.reason == "no_end_of_turn"


def test_grammars_are_compiled_once_and_the_oldest_forgotten():
    compiler = GrammarCompiler(TINY, max_cached=2)
    first = open_matcher(compiler, 'start: "a"')
    first.push(TINY.encode("a")[0])
    assert open_matcher(compiler, 'start: "a"').forced == TINY.encode("a")[0]  # starts again
    matchers = [open_matcher(compiler, f'start: "{letter}"') for letter in "bac"]
    assert compiler.counts == {"accepted": 3} and len(compiler._processes) == 2
    assert [matcher.forced for matcher in matchers] == TINY.encode("bac")  # still usable


# Valid JSON from an untrained model.


class Color(enum.Enum):
    RED = "red"
    GREEN = "green"


class Point(BaseModel):
    model_config = ConfigDict(extra="forbid")
    x: Annotated[int, Field(ge=-99, le=99)]
    label: Annotated[str, Field(max_length=4)] | None = None


class Leaf(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["leaf"]
    color: Color


class Tree(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["tree"]
    points: Annotated[list[Point], Field(max_length=2)]
    child: Leaf | Point
    flag: bool
    ratio: Annotated[float, Field(ge=0, le=1)]


@pytest.fixture(scope="module")
def loop(model) -> Iterator[EngineLoop]:
    serve = ServeConfig(slots=10, max_len=256, prefill_buckets=(8,), max_queue=64)
    loop = EngineLoop(SlotPrograms(model.config, serve), model.params, 0, model.tokenizer, serve)
    loop.start()
    yield loop
    loop.close()


async def test_thirty_seeds_give_valid_json_of_a_nested_schema(loop: EngineLoop):
    schema = Tree.model_json_schema()
    assert "$defs" in schema and "anyOf" in schema["properties"]["child"]
    results = await asyncio.gather(
        *(
            loop.submit(
                TINY.encode("json:"),
                SamplingParams(max_tokens=240, grammar=grammar(json_schema(schema)), seed=seed),
            ).result()
            for seed in range(30)
        )
    )
    stopped = [result for result in results if result.finish_reason == "stop"]
    assert len(stopped) >= 20
    for result in stopped:
        tree = Tree.model_validate_json(result.text)
        assert json.loads(result.text)["kind"] == tree.kind == "tree"
        assert any(result.forced) and not all(result.forced)
        assert all(
            p == 0 for p, f in zip(result.sampling_logprobs, result.forced, strict=True) if f
        )
    assert len({result.text for result in stopped}) > 15


async def test_any_object_is_json(loop: EngineLoop):
    # Quotes and braces are made likely, so that a random model finishes.
    bias = tuple((token_id, 3.0) for token_id in TINY.encode('"}:,'))
    results = await asyncio.gather(
        *(
            loop.submit(
                [1],
                SamplingParams(
                    max_tokens=200, grammar=grammar(json_schema()), seed=seed, logit_bias=bias
                ),
            ).result()
            for seed in range(10)
        )
    )
    stopped = [result for result in results if result.finish_reason == "stop"]
    assert len(stopped) >= 5
    assert all(isinstance(json.loads(result.text), dict) for result in stopped)
