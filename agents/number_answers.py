"""Extraction of the number that a reply gives as its answer, and comparison with the gold one."""

import re
from fractions import Fraction

_NUMBER = re.compile(
    r"""(?P<sign>(?<![\d)])[-\u2212]\s?)?(?:US\$|[$\u20ac\u00a3])?\s?(?P<minus>(?<!\d)-)?
        (?:(?P<whole>\d+)[ _](?=\d+/\d))?  # of a mixed number, as in 3 1/2
        (?:(?P<over>\d+)\s?/\s?(?P<under>\d+)
          |(?P<digits>(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?P<exponent>[eE][+-]?\d{1,3})?)
        (?P<percent>\s?(?:%|percent\b))?""",
    re.X,
)
_DIGIT = re.compile(r"\d")
_SEPARATOR = re.compile(r"(?<=\d)_(?=\d{3}(?!\d))")  # Calc-X writes 3900 as 3_900
_MARK = re.compile(r"(?:answer|result)\b[\s*:]*(?:is|are|was|equals|=|:)?|<result>|####", re.I)
_BARE_MARK = re.compile(r"(?:answer|result)[\s*]*", re.I)
_VERB = re.compile(r"\b(?:is|are|was|equals)\b|[=:]", re.I)
_EXACT = Fraction(1, 10_000)  # relative
_MAX_DIGITS = 1000  # longest number in a reply; Python refuses to parse more than 4300
_INTEGER = Fraction(1, 100)  # absolute limit, if the right number is an integer


def reward(gold: str, reply: str) -> float:
    """Return 1.0 if the answer of the reply is the gold number, else 0.0."""
    found, right = last_number(reply), _parse(_SEPARATOR.sub("", gold))
    if right is None:
        raise ValueError(f"the task's result is {gold!r}; expected a number.")
    return float(found is not None and _same(right, found))


def last_number(reply: str) -> re.Match[str] | None:
    """Return the number that a reply gives as its answer.

    It is the first number after the last "answer is", or, in an equation there, the one after the
    last "=". Without such words it is the last number of the reply. Other numbers may come between
    "answer" and "is", as in "the answer for 5 children is 40".
    """
    reply = _SEPARATOR.sub("", reply)
    last_digit = max((digit.start() for digit in _DIGIT.finditer(reply)), default=-1)
    marks = [mark for mark in _MARK.finditer(reply) if mark.end() <= last_digit]
    if not marks:
        return next(reversed(list(_NUMBER.finditer(reply))), None)
    rest = reply[marks[-1].end() :]
    sentence = re.split(r"\n|[.!?](?=\s|$)", rest.strip(), maxsplit=1)[0]
    if _BARE_MARK.fullmatch(marks[-1][0]):
        sentence = _VERB.split(sentence, maxsplit=1)[-1]
    return _NUMBER.search(sentence.rpartition("=")[2]) or _NUMBER.search(rest)


def _parse(text: str) -> re.Match[str] | None:
    """Return the number at the start of a task's `result`: `72`, `2/3 = around 0.67`, `12 km`."""
    return _NUMBER.search(text)


def _same(gold: re.Match[str], found: re.Match[str]) -> bool:
    right, value = value_of(gold), value_of(found)
    if right is None or value is None:
        return False
    if _close(gold, right, found, value):
        return True
    if bool(gold["percent"]) == bool(found["percent"]):
        return False
    # 25% may mean 25 or 0.25.
    if found["percent"]:
        return _close(gold, right, found, value / 100)
    return _close(gold, right / 100, found, value)


def _close(gold: re.Match[str], right: Fraction, found: re.Match[str], value: Fraction) -> bool:
    difference = abs(right - value)
    tolerance = _EXACT * abs(right)
    if right.denominator == 1:
        return difference <= min(tolerance, _INTEGER)
    # A number with two or more decimals may be rounded.
    decimals = min(_decimals(gold), _decimals(found))
    return difference <= max(tolerance, Fraction(1, 2 * 10**decimals) if decimals >= 2 else 0)


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
