"""Exact arithmetic on text with + - * / % ** and parentheses, within fixed bounds.

The text is parsed as a Python expression, and its tree is evaluated without executing any code.
Nodes other than numbers and these operators are refused. Every value is a fraction of at most
MAX_BITS bits, so the time is bounded by the length of the text.
"""

import ast
import math
import operator
import re
import warnings
from collections.abc import Callable
from fractions import Fraction

MAX_CHARS = 200
MAX_BITS = 1024  # each for numerator and denominator
MAX_EXPONENT = 256
DIGITS = 10  # significant digits of a result without a short decimal form


class ArithmeticFault(ValueError):
    """Text that is not arithmetic, or has too large a value. The message is for its author."""


def calculate(expression: str) -> str:
    """Return the value as a decimal: `12/60` gives `0.2`, `2/3` gives `0.6666666667`.

    Accepts thousands separators, $ before a number, ^ for **, and the printed signs for times,
    divided by and minus. Raises ArithmeticFault.
    """
    return as_text(evaluate(expression))


def evaluate(expression: str) -> Fraction:
    """Return the exact value. Raises ArithmeticFault."""
    if len(expression) > MAX_CHARS:
        raise ArithmeticFault(f"the expression has {len(expression)} characters, over {MAX_CHARS}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # for example "3(4)"
            tree = ast.parse(_plain(expression), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ArithmeticFault(
            f"{expression!r} is not arithmetic; write numbers with + - * / ** and parentheses"
        ) from None
    return _value(tree)


def as_text(value: Fraction) -> str:
    """Return the exact value if DIGITS significant digits suffice, else the rounded value."""
    if value.denominator == 1:
        return str(value.numerator)
    if abs(value) >= 10**15 or 0 < abs(value) < Fraction(1, 10**6):
        return f"{float(value):.{DIGITS}g}"
    before = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    after = max(DIGITS - before, 1)
    rounded = round(value * 10**after)
    whole, rest = divmod(abs(rounded), 10**after)
    decimals = f"{rest:0{after}d}".rstrip("0")
    sign = "-" if rounded < 0 else ""
    return f"{sign}{whole}.{decimals}" if decimals else f"{sign}{whole}"


_PRINTED_SIGNS = {0xD7: "*", 0xF7: "/", 0x2212: "-"}


def _plain(expression: str) -> str:
    text = expression.strip().translate(_PRINTED_SIGNS)
    text = re.sub(r"\$(?=\d)|(?<=\d),(?=\d{3}\b)", "", text)
    return text.replace("^", "**")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if abs(exponent) > MAX_EXPONENT:
        raise ArithmeticFault(f"the exponent {as_text(exponent)} is over {MAX_EXPONENT}")
    if exponent.denominator != 1:
        return _root(base, exponent)
    if base == 0 and exponent < 0:
        raise ArithmeticFault("division by zero")
    if _bits(base) * abs(exponent) > MAX_BITS:
        raise ArithmeticFault("the result is too large")
    return base ** int(exponent)


def _root(base: Fraction, exponent: Fraction) -> Fraction:
    """Return a power with a fractional exponent, as exact as a float."""
    if base < 0:
        raise ArithmeticFault("a root of a negative number")
    try:
        value = float(base) ** float(exponent)
    except (OverflowError, ZeroDivisionError):
        raise ArithmeticFault("the result is too large") from None
    if not math.isfinite(value):
        raise ArithmeticFault("the result is too large")
    return Fraction(value).limit_denominator(10**12)


def _divided(divide: Callable[[Fraction, Fraction], Fraction | int]) -> Callable[..., Fraction]:
    def safe(left: Fraction, right: Fraction) -> Fraction:
        if right == 0:
            raise ArithmeticFault("division by zero")
        return Fraction(divide(left, right))

    return safe


_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divided(operator.truediv),
    ast.FloorDiv: _divided(operator.floordiv),
    ast.Mod: _divided(operator.mod),
    ast.Pow: _power,
}
_UNARY: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant):
        if isinstance(node.value, int | float) and not isinstance(node.value, bool):
            return _number(node.value)
        raise ArithmeticFault("only numbers with + - * / ** and parentheses are understood")
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        value = _BINARY[type(node.op)](_value(node.left), _value(node.right))
        if _bits(value) > MAX_BITS:
            raise ArithmeticFault("the result is too large")
        return value
    raise ArithmeticFault("only numbers with + - * / ** and parentheses are understood")


def _number(value: int | float) -> Fraction:
    if not math.isfinite(value):
        raise ArithmeticFault("the number is too large")
    number = Fraction(repr(value))  # 0.1 is one tenth, not the nearest float
    if _bits(number) > MAX_BITS:
        raise ArithmeticFault("the number is too large")
    return number


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())
