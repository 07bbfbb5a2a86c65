"""Tests of the end of turn in a chat template."""

import pickle

import pytest
import tokenizers
from tokenizers import AddedToken

from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.testing.tiny import CHATML, tiny_tokenizer

NAMES = ("<eot>", "<eot>2", "<bos>")
EOT, LONGER, BOS = range(259, 262)
END_OF_TEXT, IM_START, IM_END = range(256, 259)


def _tokenizer(template: str | None, *, eos: str = "<|endoftext|>", **special: str) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(tiny_tokenizer().to_json())
    backend.add_tokens([AddedToken(name, normalized=False) for name in NAMES])
    end = backend.token_to_id(eos)
    assert end is not None
    return Tokenizer(
        backend, template=template, eos_ids=[end], special_tokens={"eos_token": eos, **special}
    )


def _turns(after: str, start: str = "") -> str:
    turn = "{% for m in messages %}{{ m.role + ': ' + m.content }}"
    return f"{start}{turn}{{% if m.role == 'assistant' %}}{after}{{% endif %}}{{% endfor %}}"


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (CHATML, {END_OF_TEXT, IM_END}),  # an instruct end of turn beside a base model's end
        (_turns("<eot>"), {END_OF_TEXT, EOT}),
        (_turns("<eot>2"), {END_OF_TEXT, LONGER}),
        (_turns(" \n<eot>\n<|endoftext|>"), {END_OF_TEXT, EOT}),
        (_turns("{{ eos_token }}"), {END_OF_TEXT}),
        (_turns(" done.<eot>"), {END_OF_TEXT}),  # text of its own, so no end of turn
        (_turns("\n"), {END_OF_TEXT}),
        (_turns("<bos>"), {END_OF_TEXT}),  # begins the next turn
        ("{{ raise_exception('no') }}", {END_OF_TEXT}),
        ("{{ messages[0].content }}<eot>", {END_OF_TEXT}),  # drops the answer
        (None, {END_OF_TEXT}),
    ],
)
def test_the_end_of_turn_of_a_template_ends_responses_too(template: str | None, ends: set) -> None:
    tokenizer = _tokenizer(template, bos_token="<bos>")
    assert tokenizer.eos_ids == ends and tokenizer.named_eos_ids == {END_OF_TEXT}
    (end,) = ends - {END_OF_TEXT} or ends
    assert tokenizer.end_of_turn_id == end  # a grammar ends with it
    copied = pickle.loads(pickle.dumps(tokenizer))
    assert (copied.eos_ids, copied.named_eos_ids) == (tokenizer.eos_ids, tokenizer.named_eos_ids)


def test_one_token_may_begin_texts_and_end_turns() -> None:
    tokenizer = _tokenizer(_turns("<eot>", "<eot>"), eos="<eot>", bos_token="<eot>")
    assert tokenizer.eos_ids == {EOT}


def test_another_template_brings_its_own_end() -> None:
    tokenizer = _tokenizer(CHATML).with_chat(template=_turns("<eot>"))
    assert tokenizer.eos_ids == {END_OF_TEXT, EOT}
