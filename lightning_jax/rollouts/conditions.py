"""Conditions on stored attempts, such as `reward > 0.9 and calls <= 3`.

A condition has Python's syntax, of which only comparisons, and, or, not, names, numbers and texts
are allowed. It is never run as code.
"""

import ast
import operator
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_jax.settings import ConfigError

Value = int | float | str | bool
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
    """Parsed condition. `names` are the values that it reads."""

    text: str
    tree: ast.expr
    names: frozenset[str]

    def holds(self, values: Mapping[str, Value]) -> bool:
        """Return whether the condition is true. A comparison with an absent value is false."""
        return _holds(self.tree, values, self.text)


def parse_condition(text: str, key: str = "--where") -> Condition:
    """Return the condition. Raises ConfigError, with `key`, if it is not a valid one."""
    try:
        if len(text) > MAX_CHARS:
            raise ValueError("too long")
        tree = ast.parse(text.strip(), mode="eval").body
        _check(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(
            f"{key} {text[:80]!r} is not a condition; expected comparisons of names and numbers, "
            "joined with and, or and not, such as 'reward > 0.9 and calls <= 3'.",
            reason="malformed",
            key=key,
        ) from error
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return Condition(text, tree, frozenset(names))


def _check(node: ast.expr) -> None:
    """Raise ValueError unless the node is a comparison, or some joined with and, or and not."""
    match node:
        case ast.BoolOp(values=values):
            for value in values:
                _check(value)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            _check(operand)
        case ast.Compare(left=left, ops=ops, comparators=others):
            if not all(type(op) in _COMPARE for op in ops):
                raise ValueError("an unknown comparison")
            for side in (left, *others):
                _check_side(side)
        case _:
            raise ValueError("not a comparison")


def _check_side(node: ast.expr) -> None:
    match node:
        case ast.Name() | ast.Constant(value=bool() | int() | float() | str()):
            return
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float())):
            return
    raise ValueError("neither a name nor a number")


def _holds(node: ast.expr, values: Mapping[str, Value], text: str) -> bool:
    match node:
        case ast.BoolOp(op=ast.And(), values=parts):
            return all(_holds(part, values, text) for part in parts)
        case ast.BoolOp(values=parts):
            return any(_holds(part, values, text) for part in parts)
        case ast.UnaryOp(operand=operand):
            return not _holds(operand, values, text)
        case ast.Compare(left=left, ops=ops, comparators=others):
            sides = [_value(side, values) for side in (left, *others)]
            if None in sides:
                return False
            pairs = zip(ops, sides, sides[1:], strict=False)
            return all(_compare(op, first, second, text) for op, first, second in pairs)
    raise AssertionError("`_check` allows nothing else")


def _value(node: ast.expr, values: Mapping[str, Value]) -> Value | None:
    match node:
        case ast.Name(id=name):
            return values.get(name)
        case ast.UnaryOp(operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Constant(value=bool() | int() | float() | str() as value):
            return value
    raise AssertionError("`_check_side` allows nothing else")


def _compare(op: ast.cmpop, first: Value | None, second: Value | None, text: str) -> bool:
    try:
        return bool(_COMPARE[type(op)](first, second))
    except TypeError as error:
        raise ConfigError(
            f"{text!r} compares {first!r} with {second!r}, a text with a number; compare values of "
            "one kind.",
            reason="wrong_type",
            key="--where",
        ) from error
