"""Tests of demonstrations as the gateway sees them."""

import pytest
from coded import raises_coded

from lightning_jax.errors import InvalidValue
from lightning_jax.gateway.prompt.render import render
from lightning_jax.gateway.prompt.tool_formats import format_of
from lightning_jax.gateway.routing import Routing
from lightning_jax.models.config import PolicyConfig
from lightning_jax.testing.tiny import CHATML, tiny_tokenizer
from lightning_jax.traces.config import RoleConfig
from lightning_jax.train.demonstrations import demonstration_sequences, end_of_turn


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
        policies={"a": PolicyConfig(), "b": PolicyConfig(trains=False)},
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
    with raises_coded(InvalidValue, "unsupported", "chat_template"):
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
    prompt = render(conversation["messages"][:1], [tool], tokenizer)
    assert first.prompt_token_ids == prompt.token_ids
    assert '"name": "f"' in tokenizer.decode(list(first.prompt_token_ids))
    # The second prompt continues the first response, token for token.
    path = first.prompt_token_ids + first.response_token_ids
    assert second.prompt_token_ids[: len(path)] == path
