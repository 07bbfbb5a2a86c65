"""Extraction of the number that a reply gives as its answer, and comparison with the gold one.

Calc-X (Kadlcik et al., EMNLP 2023) takes two results as equal if they differ by at most 1 percent.
"""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

_NUMBER = re.compile(
    r"""(?P<sign>(?<![\d)])(?:[-\u2212]\s?|\u2013))?(?:US\$|[$\u20ac\u00a3\u00a5\u20b9])?\s?
        (?P<minus>(?<!\d)-)?
        (?:(?P<whole>\d+)[ _](?=\d+/\d))?  # of a mixed number, as in 3 1/2
        (?:(?P<over>\d+)\s?/\s?(?P<under>\d+)
          |(?P<digits>(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?P<exponent>[eE][+-]?\d{1,3})?)
        (?P<percent>\s?(?:%|percent\b|per\ cent\b))?""",
    re.X,
)
_DIGIT = re.compile(r"\d")
_MARK = re.compile(
    r"""(?:answer|result)\b
        (?:[ ]+[-\u2013\u2014][ ]+  # a dash, not a minus
          |[\s*:]*(?:is|are|was|equals|=|:)?)
        |<result>|\#{4}""",
    re.I | re.X,
)
_BARE_MARK = re.compile(r"(?:answer|result)[\s*]*", re.I)
_VERB = re.compile(r"\b(?:is|are|was|equals)\b|[=:]", re.I)
_ROUNDED = 2  # decimals of a number from which on it may be rounded
_MAX_DIGITS = 1000  # longest number in a reply; Python refuses to parse more than 4300
_TOLERANCE = 1e-2  # of Calc-X's evaluation, relative to the larger number

_SEPARATOR = re.compile(r"(?<=\d)_(?=\d{3}(?!\d))")  # Calc-X writes 3900 as 3_900
_PLAIN = (  # what to write numbers of LaTeX and typography as
    (re.compile(r"\\[dt]?frac\s?\{\s?(\d{1,99})\s?\}\s?\{\s?(\d{1,99})\s?\}"), r" \1/\2"),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(r"(?<=\d)(?:\{,\}|\\,|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))"), ","),
    (re.compile(r"(?<=\n)[ \t]{0,9}[-*\u2022][ \t]+"), ""),  # items of a list have no sign
)
_VULGAR = re.compile(" ?([\u00bc-\u00be\u2150-\u215e])")  # such as one half in one character
_TYPED = str.maketrans({"\uff05": "%", "\u2044": "/", "\uff0c": ",", "\uff0e": "."})


def score(gold: str, reply: str) -> dict[str, float]:
    """Return `reward` and `result_accuracy` of a reply, 0 or 1 each.

    `result_accuracy` is 1 if Calc-X's published evaluation takes the two numbers as equal: within 1
    percent of the larger. The reward is too, but if the gold number is an integer, the answer must
    round to it, 25% may also mean 0.25, and 0.13 may stand for 0.125. Both ignore currencies, units
    and separators, which the published evaluation expects no model to write. Raises ValueError if
    the gold result has no number.
    """
    right, answer = _NUMBER.search(_SEPARATOR.sub("", gold)), last_number(reply)
    if right is None:
        raise ValueError(f"the task's result is {gold!r}; expected a number.")
    if answer is None:
        return {"reward": 0.0, "result_accuracy": 0.0}
    earned = any(_is_right(right, answer, *values) for values in _readings(right, answer))
    published = next((_is_close(*values) for values in _readings(right, answer)), False)
    return {"reward": float(earned), "result_accuracy": float(published)}


def baselines(tasks: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the mean rewards of answers that read at most the numbers of the question.

    `constant` is the best answer that is always the same. The others compute with all numbers, or
    with the first or the last two.
    """
    common = Counter(str(task["result"]) for task in tasks).most_common(5)
    numbers = [_numbers(task["question"]) for task in tasks]
    rules: dict[str, Callable[[list[Fraction]], Fraction]] = {
        "first_difference": lambda x: abs(x[0] - x[1]),
        "last_difference": lambda x: abs(x[-1] - x[-2]),
        "sum": lambda x: sum(x, start=Fraction(0)),
    }
    replies = {
        name: [str(rule(values)) if len(values) > 1 else "" for values in numbers]
        for name, rule in rules.items()
    }
    constant = max((_mean_reward(tasks, [text] * len(tasks)) for text, _ in common), default=0.0)
    return {"constant": constant} | {
        name: _mean_reward(tasks, texts) for name, texts in replies.items()
    }


def _mean_reward(tasks: Sequence[dict[str, Any]], replies: Sequence[str]) -> float:
    earned = [
        score(task["result"], reply)["reward"] for task, reply in zip(tasks, replies, strict=True)
    ]
    return math.fsum(earned) / max(len(earned), 1)


def _numbers(text: str) -> list[Fraction]:
    values = [value_of(number) for number in _NUMBER.finditer(plain(text))]
    return [value for value in values if value is not None]


def plain(text: str) -> str:
    """Return the text with numbers as `_NUMBER` reads them: no LaTeX, no characters like one half.

    `3_900`, `3{,}900` and narrow blanks between thousands are separators.
    """
    text = _SEPARATOR.sub("", text.translate(_TYPED))
    for pattern, replacement in _PLAIN:
        text = pattern.sub(replacement, text)
    return _VULGAR.sub(
        lambda match: " " + unicodedata.normalize("NFKC", match[1]).translate(_TYPED), text
    )


def last_number(reply: str) -> re.Match[str] | None:
    """Return the number that a reply gives as its answer.

    It is the first number after the last "answer is", or, in an equation there, the one after the
    last "=". Without such words it is the last number of the reply. Other numbers may come between
    "answer" and "is", as in "the answer for 5 children is 40".
    """
    reply = plain(reply)
    last_digit = max((digit.start() for digit in _DIGIT.finditer(reply)), default=-1)
    marks = [mark for mark in _MARK.finditer(reply) if mark.end() <= last_digit]
    if not marks:
        return next(reversed(list(_NUMBER.finditer(reply))), None)
    rest = reply[marks[-1].end() :]
    sentence = re.split(r"\n|[.!?](?=\s|$)", rest.strip(), maxsplit=1)[0]
    if _BARE_MARK.fullmatch(marks[-1][0]):
        sentence = _VERB.split(sentence, maxsplit=1)[-1]
    return _NUMBER.search(sentence.rpartition("=")[2]) or _NUMBER.search(rest)


def _readings(gold: re.Match[str], answer: re.Match[str]) -> Iterator[tuple[Fraction, Fraction]]:
    """Yield (gold value, answer's value) as written, then with 25% as 0.25 if one is in percent."""
    right, value = value_of(gold), value_of(answer)
    if right is None or value is None:
        return
    yield right, value
    if answer["percent"] and not gold["percent"]:
        yield right, value / 100
    if gold["percent"] and not answer["percent"]:
        yield right / 100, value


def _is_close(right: Fraction, value: Fraction) -> bool:
    try:
        return math.isclose(right, value, rel_tol=_TOLERANCE)
    except OverflowError:
        return False


def _is_right(gold: re.Match[str], answer: re.Match[str], right: Fraction, value: Fraction) -> bool:
    """Return True if the values are close and, if the right one is an integer, round to it."""
    difference = abs(right - value)
    if right.denominator == 1:
        return _is_close(right, value) and difference < Fraction(1, 2)
    decimals = min(_decimals(gold), _decimals(answer))
    rounded = decimals >= _ROUNDED and difference <= Fraction(1, 2 * 10**decimals)
    return rounded or _is_close(right, value)


def value_of(number: re.Match[str]) -> Fraction | None:
    """Return the number's value, taking 25% as 25.

    Return None for a division by zero and for a number longer than _MAX_DIGITS.
    """
    if len(number[0]) > _MAX_DIGITS:
        return None
    if number["under"]:
        if int(number["under"]) == 0:
            return None
        size = int(number["whole"] or 0) + Fraction(int(number["over"]), int(number["under"]))
    else:
        size = Fraction(number["digits"].replace(",", "") + (number["exponent"] or ""))
    return -size if number["sign"] or number["minus"] else size


def _decimals(number: re.Match[str]) -> int:
    """Return the number of decimals as written. A fraction is exact, so it has 99."""
    digits = number["digits"]
    return 99 if digits is None else len(digits.partition(".")[2])
