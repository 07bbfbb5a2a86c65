"""Tests that what a conversation has reaches the prompt, with the templates of many families."""

import logging
import random
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES, Family
from hypothesis import given, settings
from hypothesis import strategies as st
from log_events import records

from lightning_jax.gateway.prompt.habits import habits_of
from lightning_jax.gateway.prompt.render import ConversationMemory, Generated, render_prompt
from lightning_jax.gateway.prompt.tool_formats import HERMES
from lightning_jax.models.tokenizer import Tokenizer, from_hf
from lightning_jax.testing.tiny import tiny_tokenizer

TOKENIZERS = {name: family.tokenizer() for name, family in FAMILIES.items()}
END = tiny_tokenizer().encode("<|im_end|>")[0]
TABLE = Path(__file__).parents[3] / "docs" / "reference" / "chat_templates.md"
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look_up", "description": "d-look", "parameters": {}},
    },
    {"type": "function", "function": {"name": "add", "description": "d-add"}},
]


def _text(rendered: Any, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(rendered.token_ids, skip_special=False)


def conversation(rng: random.Random) -> tuple[list[dict[str, Any]], list[str]]:
    """Return messages as agents send them, and the texts that must stand in the prompt."""
    texts: list[str] = []

    def text(kind: str) -> str:
        texts.append(f"{kind}-{len(texts)}")
        return texts[-1]

    messages: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        messages.append({"role": rng.choice(["system", "developer"]), "content": text("system")})
    messages.append({"role": "user", "content": text("user")})
    for _ in range(rng.randrange(4)):
        match rng.choice(["answer", "calls", "users", "thought", "late system"]):
            case "answer":
                messages.append({"role": "assistant", "content": text("answer")})
                messages.append({"role": "user", "content": text("user")})
            case "thought":
                thought = {"reasoning_content": "a thought"}
                messages.append({"role": "assistant", "content": text("answer"), **thought})
                messages.append({"role": "user", "content": text("user")})
            case "users":
                messages.append({"role": "user", "content": text("user")})
            case "late system":
                messages.append({"role": "system", "content": text("system")})
                messages.append({"role": "user", "content": text("user")})
            case "calls":
                calls = [_call(text("argument"), number) for number in range(rng.choice([1, 1, 2]))]
                said = text("said") if rng.random() < 0.3 else None
                messages.append({"role": "assistant", "content": said, "tool_calls": calls})
                for call in calls:
                    result = {"role": "tool", "tool_call_id": call["id"], "content": text("result")}
                    messages.append(result)
    return messages, texts


def _call(argument: str, number: int) -> dict[str, Any]:
    function = {"name": "look_up", "arguments": f'{{"key": "{argument}"}}'}
    return {"id": f"call_{argument}_{number}", "type": "function", "function": function}


@pytest.mark.parametrize("name", FAMILIES)
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), offered=st.booleans())
def test_every_text_and_every_offer_is_in_the_prompt(name: str, seed: int, offered: bool) -> None:
    tokenizer = TOKENIZERS[name]
    messages, texts = conversation(random.Random(seed))
    prompt = _text(render_prompt(messages, TOOLS if offered else None, tokenizer), tokenizer)
    assert [text for text in texts if text not in prompt] == []
    names = ["look_up", "add", "d-look", "d-add"] if offered else []
    assert [name for name in names if name not in prompt] == []


@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_has_one_end_after_each_turn(name: str) -> None:
    tokenizer, memory = TOKENIZERS[name], ConversationMemory()
    messages: list[dict[str, Any]] = [{"role": "user", "content": "one"}]
    for turn in range(3):
        prompt = render_prompt(messages, TOOLS, tokenizer, memory)
        answer = {"role": "assistant", "content": f"answer {turn}"}
        sampled = (*tokenizer.encode(answer["content"]), END)
        memory.add(answer, Generated(prompt, sampled))
        messages += [answer, {"role": "user", "content": "more"}]
        longer = render_prompt(messages, TOOLS, tokenizer, memory)
        path = prompt.token_ids + sampled
        assert (longer.token_ids[: len(path)], longer.breaks) == (path, 0)
        rest = tokenizer.decode(longer.token_ids[len(path) :], skip_special=False)
        assert not rest.lstrip().startswith("<|im_end|>")


def test_another_end_than_the_templates_is_the_only_one() -> None:
    """A base model's own end stays beside the end of turn of its chat template."""
    tokenizer = Family(
        FAMILIES["OLMo 2"].template, ends=("<|im_end|>", "<|endoftext|>")
    ).tokenizer()
    other = tokenizer.encode("<|endoftext|>")
    assert len(other) == 1 and tokenizer.template_end_id == END
    memory = ConversationMemory()
    first = render_prompt([{"role": "user", "content": "hi"}], None, tokenizer, memory)
    answer, sampled = {"role": "assistant", "content": "x"}, (*tokenizer.encode("x"), *other)
    memory.add(answer, Generated(first, sampled))
    turns = [{"role": "user", "content": "hi"}, answer, {"role": "user", "content": "more"}]
    text = _text(render_prompt(turns, None, tokenizer, memory), tokenizer)
    assert "\nx<|endoftext|>\n<|im_start|>user\nmore" in text


def test_later_system_messages_are_the_users_where_a_template_refuses_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Claude Code sends one after the user's, and Codex two developer messages."""
    caplog.set_level(logging.INFO, "lightning_jax")
    strict = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('the system message must be the first') }}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    tokenizer = Family(strict).tokenizer()
    system, user = {"role": "system", "content": "s1"}, {"role": "user", "content": "u"}
    later = {"role": "system", "content": "s2"}
    folded = {
        "<|im_start|>system\ns1<|im_end|>\n<|im_start|>user\nu<|im_end|>\n"
        "<|im_start|>user\ns2<|im_end|>\n": [system, user, later],
        "<|im_start|>system\ns1\n\ns2<|im_end|>\n<|im_start|>user\nu<|im_end|>\n": [
            *(system, later, user)
        ],
    }
    for text, messages in folded.items():
        for _ in range(2):
            assert _text(render_prompt(messages, None, tokenizer), tokenizer) == text
    (record,) = records(caplog, "conversation_rewritten")
    assert len(record.changes) == 1
    lenient = tiny_tokenizer()
    assert "system\ns2" in _text(render_prompt([system, user, later], None, lenient), lenient)
    assert len(records(caplog, "conversation_rewritten")) == 1


@pytest.mark.parametrize(("switch", "mode"), [("/no_think", "/no_think"), ("/think", "/think")])
def test_a_word_that_the_template_reads_and_removes_is_not_missing(switch: str, mode: str) -> None:
    """SmolLM3 reads such words in the system message alone, so it must stay there."""
    system = {"role": "system", "content": f"Be brief. {switch}"}
    user = {"role": "user", "content": "hi"}
    text = _text(render_prompt([system, user], None, TOKENIZERS["SmolLM3"]), TOKENIZERS["SmolLM3"])
    assert text.startswith(f"<|im_start|>system\nmode: {mode}\nBe brief.<|im_end|>")
    assert text.endswith("</think>\n") == (mode == "/no_think")
    path = {"role": "system", "content": "Use /no_thinking/a."}  # the template spoils this word
    text = _text(render_prompt([path, user], None, TOKENIZERS["SmolLM3"]), TOKENIZERS["SmolLM3"])
    assert "<|im_start|>user\nUse /no_thinking/a." in text


def test_the_table_in_the_docs_is_what_the_trials_find() -> None:
    rows = {}
    for name, tokenizer in TOKENIZERS.items():
        facts = [how or "yes" for how in habits_of(tokenizer).facts().values()]
        rows[name] = f"| {' | '.join([name, *facts])} |"
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    assert [row for row in rows.values() if row not in lines] == []
    assert sum(line.startswith("|") for line in lines) == len(rows) + 2


def test_the_template_for_tools_is_used_with_tools_and_saved(tmp_path: Path) -> None:
    tokenizer = TOKENIZERS["Hermes 2 Pro and 3"]
    assert habits_of(tokenizer).writing.offers == "template"
    user = [{"role": "user", "content": "hi"}]
    assert "# Tools" in _text(render_prompt(user, TOOLS, tokenizer), tokenizer)
    assert "# Tools" not in _text(render_prompt(user, None, tokenizer), tokenizer)
    tokenizer.save(tmp_path)
    again = from_hf(tmp_path)
    assert (again.template, again.tool_template) == (tokenizer.template, tokenizer.tool_template)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    (tmp_path / "chat_template.jinja").write_text("plain")
    apart = from_hf(tmp_path)
    assert (apart.template, apart.tool_template) == ("plain", "{{ tools }}")
    assert apart.with_chat(template="mine").tool_template is None


def test_a_template_that_takes_nothing_says_so() -> None:
    lost = habits_of(tiny_tokenizer().with_chat(template="always the same"))
    assert {how for what, how in lost.facts().items() if what != "thoughts"} == {"lost"}
    assert HERMES.name not in lost.describe()


def test_the_log_names_thoughts_alone_without_alarm() -> None:
    said = habits_of(TOKENIZERS["Qwen2.5"]).describe()
    assert said == "the chat template takes conversations as they are, without thoughts"
