"""Tests of fields of JSON bodies: coercions, and errors that name the first invalid field."""

import math
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Discriminator, Field, ValidationError

from lightning_jax.gateway.dialects.all import DIALECTS
from lightning_jax.gateway.dialects.base import Sender
from lightning_jax.gateway.dialects.saved_responses import SavedConversations
from lightning_jax.gateway.errors import ApiError
from lightning_jax.gateway.fields import (
    MAX_INT32,
    Fields,
    Integer,
    Listed,
    Name,
    Number,
    Strings,
    TopK,
    harmless,
)


class Cat(Fields):
    kind: Literal["cat"]
    name: Name


class Dog(Fields):
    kind: Literal["dog"]
    dog: bool


class Home(Fields, extra="allow"):
    count: Annotated[Integer, Field(ge=0, le=9)] | None = None
    size: Number | None = None
    top: TopK | None = None
    stop: Strings | None = None
    pets: Listed[Annotated[Cat | Dog, Discriminator("kind")]] | None = None
    house: Annotated[Any, harmless("", 1)] = None


def test_values_are_coerced_as_clients_write_them() -> None:
    home = Home.read({"count": 3.0, "size": 10**400, "top": -1, "stop": "a", "house": 1, "x": 2})
    assert (home.count, home.size, home.top, home.stop) == (3, MAX_INT32, 0, ("a",))
    assert home.model_extra == {"x": 2}
    assert Home.read({"stop": ["a", "b"], "size": 1}).stop == ("a", "b")


def test_null_counts_as_missing() -> None:
    assert Home.read(dict.fromkeys(Home.model_fields)) == Home.read({})


@pytest.mark.parametrize(
    ("body", "key", "code", "reason"),
    [
        ({"count": True}, "count", "invalid_type", "wrong_type"),
        ({"count": 1.5}, "count", "invalid_type", "wrong_type"),
        ({"count": "1"}, "count", "invalid_type", "wrong_type"),
        ({"count": 10**6000}, "count", "invalid_value", "out_of_range"),
        ({"size": False}, "size", "invalid_type", "wrong_type"),
        ({"size": math.nan}, "size", "invalid_value", "out_of_range"),
        ({"stop": ["a", 1]}, "stop[1]", "invalid_value", "wrong_type"),
        ({"stop": {"a": 1}}, "stop", "invalid_type", "wrong_type"),
        ({"pets": {}}, "pets", "invalid_type", "wrong_type"),
        ({"pets": [1]}, "pets[0]", "invalid_value", "wrong_type"),
        ({"pets": [{}]}, "pets[0]", "invalid_value", "wrong_type"),
        ({"pets": [{"kind": "{x}"}]}, "pets[0].kind", "invalid_value", "unknown"),
        ({"pets": [{"kind": []}]}, "pets[0].kind", "invalid_value", "unknown"),
        ({"pets": [{"kind": "cat"}]}, "pets[0].name", "invalid_value", "missing"),
        ({"pets": [{"kind": "cat", "name": ""}]}, "pets[0].name", "invalid_value", "wrong_type"),
        ({"pets": [{"kind": "dog", "dog": 1}]}, "pets[0].dog", "invalid_value", "wrong_type"),
        ({"count": "x", "house": 2}, "house", "unsupported_parameter", "unsupported"),
    ],
)
def test_the_wrong_field_is_named(body: Any, key: str, code: str, reason: str) -> None:
    with pytest.raises(ApiError) as caught:
        Home.read(body)
    error = caught.value
    assert (error.key, error.code, error.reason) == (key, code, reason)
    assert (error.status, error.param) == (400, key.partition("[")[0])
    assert error.message.startswith(f"{key} is ")


def test_a_long_list_is_read_up_to_its_first_error() -> None:
    for body in ({"stop": [1] * 10_000}, {"pets": [1] * 10_000}):
        with pytest.raises(ApiError) as caught:
            Home.read(body)
        assert isinstance(caught.value.__cause__, ValidationError)
        assert caught.value.__cause__.error_count() == 1


BODIES: dict[str, dict[str, Any]] = {
    "messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    "prompt": {"prompt": "hi"},
    "input": {"input": "hi"},
    "contents": {"contents": [{"parts": [{"text": "hi"}]}]},
}
WORDS = ("type", "text", "role", "user", "function", "name", "tool_use", "json_schema", "{0}", "")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner),
    max_leaves=8,
)


@settings(deadline=None, max_examples=1000)
@given(data=st.data())
def test_no_value_of_a_field_is_our_error(data: st.DataObject) -> None:
    names = (
        *("messages", "tools", "tool_choice", "response_format", "text", "stop", "logit_bias"),
        *("options", "format", "system", "generationConfig", "systemInstruction", "toolConfig"),
        *("contents", "input", "prompt", "metadata", "temperature", "n", "model", "seed"),
    )
    dialect = data.draw(st.sampled_from(DIALECTS))
    body = {**data.draw(st.sampled_from([*BODIES.values()])), "model": "policy"}
    body[data.draw(st.sampled_from(names))] = data.draw(JSON)
    sender = Sender({}, {"model": "policy"}, {}, "tiny", SavedConversations())
    try:
        dialect.parse(body, sender)
    except ApiError as error:
        assert error.status in (400, 404) and len(error.message) > 10
