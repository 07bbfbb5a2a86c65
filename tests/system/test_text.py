"""Tests that texts of agents in the log are one marked message and move no cursor."""

import logging
import subprocess
import sys

import pytest

from lightning_jax.system.text import PlainFormatter, has_words, in_one_line, with_marked_lines

FORGED = "bad\x1b[2J\nstep 9: reward_mean 1.0\r\nerror: \u2028done\x9b1m"


def _lines(record: logging.LogRecord) -> list[str]:
    return PlainFormatter().format(record).splitlines()


def _record(message: str, *args: object, error: Exception | None = None) -> logging.LogRecord:
    info = (type(error), error, None) if error else None
    return logging.LogRecord("lightning_jax", logging.WARNING, "", 1, message, args, info)


@pytest.mark.parametrize("error", [None, ValueError(FORGED)])
def test_no_text_begins_a_line_of_the_log(error: Exception | None) -> None:
    first, *others = _lines(_record("%s failed", FORGED, error=error))
    assert first.startswith("bad")
    assert others and all(line.startswith("  | ") for line in others)
    assert not any(char in "\x1b\x9b\u2028" for line in (first, *others) for char in line)


def test_a_plain_message_stays() -> None:
    assert _lines(_record("step %d: %s", 3, "loss 0.1 é 日本")) == ["step 3: loss 0.1 é 日本"]
    assert PlainFormatter().format(_record("")) == ""
    assert with_marked_lines("a\nb") == "a\n  | b"


def test_a_text_in_one_line_is_cut() -> None:
    assert in_one_line(FORGED) == "bad\u241b[2J step 9: reward_mean 1.0 error: done\ufffd1m"
    assert in_one_line("a" * 10**7, 20) == "a" * 17 + "..."
    assert in_one_line("") == ""


def test_the_command_prints_its_log_in_marked_lines() -> None:
    program = (
        "import logging; from lightning_jax.system.text import log_plainly; log_plainly(); "
        f"logging.getLogger('lightning_jax.x').info('%s', {FORGED!r}); "
        f"logging.getLogger('other').warning({FORGED!r})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    lines = done.stderr.decode().splitlines()
    assert len(lines) == 8 and sum(line.startswith("bad") for line in lines) == 2
    assert sum(line.startswith("  | ") for line in lines) == 6 and b"\x1b" not in done.stderr


@pytest.mark.parametrize(
    ("part", "is_in"),
    [("two\n words ", True), ("twowords", False), ("words two", False), (" \n", True)],
)
def test_words_are_found_whatever_is_between_them(part: str, is_in: bool) -> None:
    assert has_words("has  two\twords.", part) is is_in
