"""Tests that untrusted text is safe to print and keeps its content."""

import pytest
from view_records import TOKENIZER

from lightning_jax.studio.build import split_text, token_texts
from lightning_jax.studio.records import as_text, cut
from lightning_jax.system.text import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext\n", "plain\ttext\n"),
        ("a\r\nb", "a\nb"),
        ("\x1b[2Jgone\x07", "\u241b[2Jgone\u2407"),  # would clear the screen and ring the bell
        ("\x9b31m", "\ufffd31m"),  # the one-byte start of such a sequence
        ("abc\u202etxt", "abc\ufffdtxt"),  # would be shown reversed
        ("\x00\x7f\ud800", "\u2400\u2421\ufffd"),
        ("日本 émoji 🙂", "日本 émoji 🙂"),
    ],
)
def test_control_characters_become_visible(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(shown) == shown
    printable(text).encode()


def test_a_cut_says_how_much_is_missing() -> None:
    text = "".join(chr(65 + i % 26) for i in range(1_000_000))
    shown = cut(text, 100)
    assert "999,900" in shown and len(shown) < 150
    assert shown.startswith(text[:75]) and shown.endswith(text[-25:])
    assert cut(text, 0) == text and cut("abc", 3) == "abc"
    head, hint, tail = cut("abcd", 3).split("\n")
    assert (head, tail) == ("abc", "") and "1" in hint


def test_values_that_are_no_text_are_json() -> None:
    assert as_text({"a": ["é", 1.5, None]}) == '{"a": ["é", 1.5, null]}'
    assert as_text((1, 2)) == "[1, 2]"
    assert as_text("a\x1b") == "a\u241b"


def test_a_prompt_is_split_between_characters() -> None:
    ids = TOKENIZER.encode("<|im_start|>é日<|im_end|>")  # 1 + 2 + 3 + 1 tokens
    parts = [split_text(ids, at, TOKENIZER) for at in range(len(ids) + 1)]
    assert parts[0] == ("", "<|im_start|>é日<|im_end|>")
    assert parts[3] == ("<|im_start|>é", "日<|im_end|>")
    assert parts[4] == parts[5] == parts[3]
    assert all(head + rest == parts[0][1] for head, rest in parts)


def test_tokens_add_up_to_the_text() -> None:
    ids = TOKENIZER.encode("日\x1b!<|im_end|>")
    assert token_texts(ids, TOKENIZER) == ("", "", "日", "\u241b", "!", "<|im_end|>")
    assert token_texts(ids[:2], TOKENIZER) == ("", "\ufffd")  # bytes that never form a character
    assert token_texts((), TOKENIZER) == ()
