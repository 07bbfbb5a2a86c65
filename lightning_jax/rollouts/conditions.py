"""Conditions on stored attempts, such as `reward > 0.9 and calls <= 3`.

A condition has Python's syntax, of which only comparisons, and, or, not, names, numbers and texts
are allowed. It is never run as code.
"""

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_jax.settings import ConfigError

Value = int | float | str | bool
Values = Mapping[str, Value]
MAX_CHARS = 1000
_COMPARE = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


@dataclass(frozen=True)
class Condition:
    """Parsed condition.

    `names` are the values that it reads, and `holds` evaluates it. Comparisons with a missing value
    are false.
    """

    text: str
    names: frozenset[str]
    holds: Callable[[Values], bool]


def parse_condition(text: str, key: str = "--where") -> Condition:
    """Return the parsed condition. Raises ConfigError, with `key`, if it is invalid."""
    try:
        if len(text) > MAX_CHARS:
            raise ValueError("too long")
        tree = ast.parse(text.strip(), mode="eval").body
        holds = _test(tree, text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError.malformed(
            key,
            f"{key} {text[:80]!r} is not a condition; expected comparisons of names and numbers, "
            "joined with and, or and not, such as 'reward > 0.9 and calls <= 3'.",
        ) from error
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return Condition(text, frozenset(names), holds)


def _test(node: ast.expr, text: str) -> Callable[[Values], bool]:
    """Return a function that evaluates comparisons joined with and, or and not.

    Raises ValueError for any other node.
    """
    match node:
        case ast.BoolOp(op=op, values=parts):
            tests = [_test(part, text) for part in parts]
            joined = all if isinstance(op, ast.And) else any
            return lambda values: joined(test(values) for test in tests)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            test = _test(operand, text)
            return lambda values: not test(values)
        case ast.Compare(left=left, ops=ops, comparators=others):
            compare = [_COMPARE[type(op)] for op in ops if type(op) in _COMPARE]
            sides = [_side(side) for side in (left, *others)]
            if len(compare) == len(ops):
                return lambda values: _compare(compare, [side(values) for side in sides], text)
    raise ValueError("not a comparison")


def _side(node: ast.expr) -> Callable[[Values], Value | None]:
    """Return a function that reads a name or a constant. Raises ValueError for any other node."""
    match node:
        case ast.Name(id=name):
            return lambda values: values.get(name)
        case ast.Constant(value=bool() | int() | float() | str() as constant):
            return lambda values: constant
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return lambda values: -number
    raise ValueError("neither a name nor a number")


def _compare(
    compare: Sequence[Callable[[Any, Any], bool]], values: Sequence[Value | None], text: str
) -> bool:
    """Return True if every comparison of neighbors holds, and False if a value is missing."""
    if None in values:
        return False
    for holds, first, second in zip(compare, values, values[1:], strict=False):
        try:
            if not holds(first, second):
                return False
        except TypeError as error:
            raise ConfigError.wrong_type(
                "--where",
                f"{text!r} compares {first!r} with {second!r}, a text with a number; compare "
                "values of one kind.",
            ) from error
    return True
