"""Tests of demonstrations as the gateway sees them."""

from collections.abc import Iterator
from typing import Any

import pytest
from coded import raises_coded

from lightning_jax.gateway.calls.routing import Routing
from lightning_jax.gateway.prompt.render import render_prompt
from lightning_jax.gateway.prompt.tool_formats import format_of
from lightning_jax.models.config import PolicyConfig
from lightning_jax.models.policies import PolicyTable
from lightning_jax.settings import ConfigError
from lightning_jax.testing.tiny import CHATML, tiny_tokenizer
from lightning_jax.traces.config import RoleConfig
from lightning_jax.train.tasks.conversations import call_demonstrations
from lightning_jax.train.tasks.demonstrations import demonstration_sequences, end_of_turn
from lightning_jax.train.tasks.record_files import DatasetError
from lightning_jax.types import Task


def test_demonstrations_are_paths_of_one_conversation() -> None:
    tokenizer = tiny_tokenizer()
    conversation = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "bad", "train": False},
        {"role": "user", "content": "no"},
        {"role": "assistant", "content": "good"},
    ]
    (sequence,) = demonstration_sequences([conversation], tokenizer)
    end = tokenizer.encode("<|im_end|>")
    assert list(sequence.response_token_ids) == tokenizer.encode("good") + end
    prompt = "".join(
        f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in conversation[:3]
    )
    assert list(sequence.prompt_token_ids) == tokenizer.encode(prompt + "<|im_start|>assistant\n")


def test_all_demonstrated_tokens_weigh_the_same() -> None:
    tokenizer = tiny_tokenizer()
    conversations = [
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]
        for text in ("a", "bcd")
    ]
    sequences = demonstration_sequences(conversations, tokenizer)
    assert [len(s.response_token_ids) for s in sequences] == [2, 4]  # including end-of-turn
    assert [s.weight for s in sequences] == [pytest.approx(1 / 6)] * 2


def test_demonstrations_go_to_the_policies_that_roles_name() -> None:
    routing = Routing(
        roles={
            "w": RoleConfig(agent="writer", policy="a"),
            "r": RoleConfig(system="terse", policy="b"),
        },
        policies=PolicyTable.of({"a": PolicyConfig(), "b": PolicyConfig(trains=False)}),
    )
    conversations = [
        [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "named", "agent": "writer"},
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "anyone"},
        ],
        [
            {"role": "system", "content": "Be terse."},
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "ok"},
        ],
    ]
    tokenizer = tiny_tokenizer()
    sequences = demonstration_sequences(conversations, tokenizer, routing)
    words = [tokenizer.decode(sequence.response_token_ids[:-1]) for sequence in sequences]
    found = sorted(
        (sequence.adapter, text) for sequence, text in zip(sequences, words, strict=True)
    )
    assert found == [(0, "anyone"), (0, "named"), (1, "anyone"), (1, "ok")]
    for index in (0, 1):  # each policy learns separately
        of_policy = [sequence for sequence in sequences if sequence.adapter == index]
        assert sum(e.weight * len(e.response_token_ids) for e in of_policy) == pytest.approx(1.0)
    plain = demonstration_sequences(conversations, tokenizer)
    assert [sequence.adapter for sequence in plain] == [None] * 3
    assert "writer" not in tokenizer.decode(plain[1].prompt_token_ids)


def test_the_end_of_turn_is_the_templates() -> None:
    tokenizer = tiny_tokenizer()
    assert end_of_turn(tokenizer) == tokenizer.token_id("<|im_end|>")


@pytest.mark.parametrize(
    ("old", "new", "prompt_ends", "learned"),
    [
        ("", "", "assistant\n", "<think>\nhm\n</think>\n\n4"),
        ("assistant\\n'", "assistant\\n<think>\\n'", "<think>\n", "hm\n</think>\n\n4"),
        (
            "+ message['content']",
            "+ ('[' ~ message.reasoning_content ~ ']' if message.reasoning_content else '')"
            " + message['content']",
            "assistant\n",
            "[hm]4",
        ),
    ],
    ids=["dropped by the template", "opened by the prompt", "in the template's form"],
)
def test_a_demonstrated_thought_is_learned(
    old: str, new: str, prompt_ends: str, learned: str
) -> None:
    template = CHATML.replace(old, new)
    tokenizer = tiny_tokenizer().with_chat(template=template)
    talk = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4", "reasoning_content": "hm"},
    ]
    (sequence,) = demonstration_sequences([talk], tokenizer)
    assert tokenizer.decode(sequence.prompt_token_ids).endswith(prompt_ends)
    assert tokenizer.decode(sequence.response_token_ids) == learned
    assert sequence.response_token_ids[-1] == end_of_turn(tokenizer)


def test_the_end_of_turn_may_follow_a_blank() -> None:
    tiny = tiny_tokenizer()
    template = (tiny.template or "").replace("+ '<|im_end|>", "+ ' <|im_end|>")
    assert template != tiny.template
    assert end_of_turn(tiny.with_chat(template=template)) == tiny.token_id("<|im_end|>")
    with raises_coded(ConfigError, "unsupported", "chat_template"):
        end_of_turn(tiny.with_chat(template="{% for m in messages %}{{ m.content }}{% endfor %}"))


def test_a_demonstrated_tool_call_is_written_as_the_model_would() -> None:
    tokenizer = tiny_tokenizer()
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    strict = tool | {"function": tool["function"] | {"strict": False}}  # the gateway ignores it
    conversation = {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "so", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "2"},
            {"role": "assistant", "content": "2"},
        ],
        "tools": [strict],
    }
    first, second = demonstration_sequences([conversation], tokenizer)
    form, end = format_of(tokenizer), tokenizer.encode("<|im_end|>")
    written = f"so{form.write([('f', {'a': 1})])}"
    assert list(first.response_token_ids) == tokenizer.encode(written) + end
    assert written == 'so<tool_call>[{"name": "f", "arguments": {"a": 1}}]</tool_call>'
    prompt = render_prompt(conversation["messages"][:1], [tool], tokenizer)
    assert first.prompt_token_ids == prompt.token_ids
    assert '"name": "f"' in tokenizer.decode(list(first.prompt_token_ids))
    # The second prompt continues the first response, token for token.
    path = first.prompt_token_ids + first.response_token_ids
    assert second.prompt_token_ids[: len(path)] == path


CALL = {"name": "f", "arguments": '{"a": 1}'}
TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}


def _with_call(function: Any, **fields: Any) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": function}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "so", "tool_calls": [call]} | fields,
        {"role": "tool", "tool_call_id": "1", "content": "2"},
        {"role": "assistant", "content": "2"},
    ]
    return {"messages": messages, "tools": [TOOL]}


def _tokens(conversation: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    found = demonstration_sequences([conversation], tiny_tokenizer())
    return [(sequence.prompt_token_ids, sequence.response_token_ids) for sequence in found]


NULLS = {"name": None, "train": None, "weight": None, "agent": None, "reasoning_content": None}
PARTS = [{"type": "text", "text": "s"}, {"type": "text", "text": "o"}]


@pytest.mark.parametrize(
    "conversation",
    [
        _with_call(CALL, content=PARTS),
        _with_call(CALL, **NULLS),
        _with_call({"name": "f", "arguments": {"a": 1}}),
        _with_call(CALL, weight=1, train=True),
        _with_call(CALL) | {"chat_template_kwargs": None, "source": object()},
        _with_call(CALL) | {"tools": [TOOL | {"function": TOOL["function"] | {"strict": None}}]},
        {**_with_call(CALL), "messages": tuple(_with_call(CALL)["messages"])},
    ],
)
def test_forms_of_the_gateways_messages_give_the_same_tokens(conversation: Any) -> None:
    assert _tokens(conversation) == _tokens(_with_call(CALL))


@pytest.mark.parametrize("nothing", [None, "", " ", {}, "{}", "null"])
def test_a_demonstrated_call_without_arguments_is_one(nothing: Any) -> None:
    calls = _tokens(_with_call({"name": "f", "arguments": nothing}))
    assert calls == _tokens(_with_call({"name": "f", "arguments": "{}"}))


def test_nulls_are_fields_that_are_not_there() -> None:
    plain = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    nulls = [
        message | NULLS | {"tool_calls": None, "tool_call_id": None, "function_call": None}
        for message in plain
    ]
    assert _tokens({"messages": nulls, "tools": None, "functions": None}) == _tokens(plain)
    (sequence,) = demonstration_sequences([nulls], tiny_tokenizer(), _TWO_POLICIES)
    assert sequence.adapter == 0  # of the role without a name, not of one named None


_TWO_POLICIES = Routing(
    roles={"n": RoleConfig(agent="None", policy="b"), "any": RoleConfig(agent="*", policy="a")},
    policies=PolicyTable.of({"a": PolicyConfig(), "b": PolicyConfig()}),
)


def test_a_call_without_text_and_a_context_of_odd_calls() -> None:
    ((_, response), _) = _tokens(_with_call(CALL, content=None))
    assert tiny_tokenizer().decode(response[:-1]).startswith("<tool_call>")
    cut = _with_call({"name": "f", "arguments": '{"a": '}, weight=0)
    assert len(_tokens(cut)) == 1  # as the gateway reads a call that was cut short


@pytest.mark.parametrize("mark", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"train": 0}])
def test_messages_of_weight_0_are_context(mark: dict[str, Any]) -> None:
    (only,) = _tokens(_with_call(CALL, **mark))
    assert only == _tokens(_with_call(CALL))[1]


LOOP: list[Any] = []
LOOP.append(LOOP)
USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("conversation", "reason", "key"),
    [
        (None, "wrong_type", ""),
        ("q", "wrong_type", ""),
        (3, "wrong_type", ""),
        ({"prompt": "q", "completion": "a"}, "wrong_type", ""),
        ({"messages": None}, "wrong_type", ""),
        ([], "empty", ".messages"),
        ([None], "wrong_type", ".messages[0]"),
        (["q"], "wrong_type", ".messages[0]"),
        ([USER, {"role": "bot", "content": "a"}], "unknown", ".messages[1].role"),
        ([USER, {"content": "a"}], "unknown", ".messages[1].role"),
        ([USER, {"role": "assistant"}], "missing", ".messages[1].content"),
        ([USER, ASSISTANT | {"content": 4}], "wrong_type", ".messages[1].content"),
        (
            [USER | {"content": [{"type": "image_url"}]}, ASSISTANT],
            "not_text",
            ".messages[0].content[0]",
        ),
        ([USER, ASSISTANT | {"content": "\ud83d"}], "wrong_type", ".messages[1]"),
        ([USER, ASSISTANT | {"content": {1, 2}}], "not_json", ".messages[1]"),
        ([USER, ASSISTANT | {"name": LOOP}], "not_json", ".messages[1]"),
        ([USER, ASSISTANT | {"weight": 0.5}], "wrong_type", ".messages[1].weight"),
        ([USER, ASSISTANT | {"weight": 2}], "out_of_range", ".messages[1].weight"),
        ([USER, ASSISTANT | {"weight": "0"}], "wrong_type", ".messages[1].weight"),
        ([USER, ASSISTANT | {"train": "no"}], "wrong_type", ".messages[1].train"),
        ([USER, ASSISTANT | {"agent": 3}], "wrong_type", ".messages[1].agent"),
        (
            [USER, ASSISTANT | {"function_call": CALL}],
            "unsupported",
            ".messages[1].function_call",
        ),
        ([USER, ASSISTANT | {"tool_calls": "f"}], "malformed", ".messages[1].tool_calls"),
        (
            [USER, ASSISTANT | {"tool_calls": [{"name": "f"}]}],
            "malformed",
            ".messages[1].tool_calls",
        ),
        (_with_call({"arguments": {}}), "malformed", ".messages[1].tool_calls"),
        (
            _with_call({"name": "f", "arguments": '{"a": '}),
            "wrong_type",
            ".messages[1].tool_calls[0].function.arguments",
        ),
        (
            _with_call({"name": "f", "arguments": [1]}),
            "wrong_type",
            ".messages[1].tool_calls[0].function.arguments",
        ),
        (_with_call({"name": "f", "arguments": {"a": float("nan")}}), "not_json", ".messages[1]"),
        (_with_call(CALL) | {"tools": {"f": 1}}, "wrong_type", ".tools"),
        (_with_call(CALL) | {"tools": [CALL]}, "missing", ".tools[0].function"),
        (
            _with_call(CALL) | {"tools": [TOOL | {"function": {}}]},
            "missing",
            ".tools[0].function.name",
        ),
        (_with_call(CALL) | {"functions": [CALL]}, "unsupported", ".functions"),
    ],
)
def test_anything_else_is_named_with_its_index(conversation: Any, reason: str, key: str) -> None:
    good = [USER, ASSISTANT]
    with raises_coded(DatasetError, reason, f"conversations[1]{key}"):
        demonstration_sequences([good, conversation], tiny_tokenizer())


def test_what_a_template_refuses_is_named_with_its_index() -> None:
    template = "{{ raise_exception('no') if messages[0].content == 'x' else '' }}"
    odd = tiny_tokenizer()
    odd.template = f"{template}{odd.template}"
    with raises_coded(DatasetError, "rejected", "conversations[1].messages[1]"):
        demonstration_sequences([[USER, ASSISTANT], [USER | {"content": "x"}, ASSISTANT]], odd)


async def _coroutine(tasks: list[Task]) -> list[Any]:
    return []


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (None, "wrong_type"),
        ("text", "wrong_type"),
        ({"messages": []}, "wrong_type"),
        (3, "wrong_type"),
    ],
)
def test_a_function_of_demonstrations_returns_a_list(returned: Any, reason: str) -> None:
    with raises_coded(DatasetError, reason, "warmup.demonstrations"):
        call_demonstrations(lambda tasks: returned, [])
    with raises_coded(DatasetError, reason, "warmup.demonstrations"):
        call_demonstrations(_coroutine, [])


def test_a_function_of_demonstrations_may_yield_and_may_fail() -> None:
    def generated(tasks: list[Task]) -> Iterator[Any]:
        for task in tasks:
            yield [{"role": "user", "content": task["text"]}, ASSISTANT]

    assert len(call_demonstrations(generated, [{"id": "1", "text": "q"}])) == 1
    with raises_coded(DatasetError, "failed", "warmup.demonstrations") as failed:
        call_demonstrations(generated, [{"id": "1"}])
    assert "KeyError" in str(failed.value) and __file__ in str(failed.value)
