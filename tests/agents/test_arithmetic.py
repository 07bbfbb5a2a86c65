"""Tests of arithmetic on text: right values, fixed bounds, and no code execution."""

import ast
import builtins
import time
from fractions import Fraction

import pytest
from arithmetic import MAX_BITS, ArithmeticFault, as_text, calculate, evaluate
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.mark.parametrize(
    "expression, value",
    [
        ("48/2", "24"),
        ("12/60", "0.2"),
        ("2/3", "0.6666666667"),
        ("0.1 + 0.2", "0.3"),
        ("2/3 * 3", "2"),
        ("-7 + 2", "-5"),
        ("-1/8", "-0.125"),
        ("7 // 2", "3"),
        ("7 % 4", "3"),
        ("2**10", "1024"),
        ("2^10", "1024"),
        ("4**-1", "0.25"),
        ("2**0.5", "1.414213562"),
        ("1,234 * 2", "2468"),
        ("$5.50 * 2", "11"),
        ("3 \u00d7 4 \u2212 8 \u00f7 2", "8"),
        ("(1 + 2) * (3 + 4)", "21"),
        ("1e3", "1000"),
        ("100000000000000000000/3", "3.333333333e+19"),
        ("1/12345678", "8.100000664e-08"),
        ("99999.99999999", "100000"),
    ],
)
def test_values_by_hand(expression: str, value: str) -> None:
    assert calculate(expression) == value


# What the model is told: other words are another environment.
@pytest.mark.parametrize(
    "expression, message",
    [
        ("1/0", "division by zero"),
        ("5 % 0", "division by zero"),
        ("0**-1", "division by zero"),
        ("(-8)**0.5", "root of a negative"),
        ("9**9**9", "exponent"),
        ("10**256 * 10**256", "too large"),
        ("1e999", "too large"),
        ("1" * 201, "201 characters"),
        ("(" * 99 + "1", "not arithmetic"),
        ("", "not arithmetic"),
        ("2 +", "not arithmetic"),
        ("x", "only numbers"),
        ("'a' * 9", "only numbers"),
        ("True + 1", "only numbers"),
        ("1j * 1j", "only numbers"),
        ("abs(-1)", "only numbers"),
        ("(1).real", "only numbers"),
        ("[1][0]", "only numbers"),
        ("1 if 2 else 3", "only numbers"),
        ("lambda: 1", "only numbers"),
        ("__import__('os').getpid()", "only numbers"),
        ("1 < 2", "only numbers"),
        ("~5", "only numbers"),
        ("1 << 9", "only numbers"),
        ("1; 2", "not arithmetic"),
        ("x := 1", "not arithmetic"),
        ("\0", "not arithmetic"),
    ],
)
def test_all_else_is_refused(expression: str, message: str) -> None:
    with pytest.raises(ArithmeticFault, match=message):
        calculate(expression)


WORDS = """1 2.5 x __import__ () [] {} . ** * / // % - ~ ( ) [ ] : = , lambda if else 'a' f'{1}' @
os system eval exec print open getattr _ e j await yield ;"""
PIECES = st.sampled_from([*WORDS.split(), " ", "\n", "9" * 40])


@settings(max_examples=400, deadline=None)
@given(st.one_of(st.text(max_size=60), st.lists(PIECES, max_size=25).map("".join)))
def test_a_text_is_a_number_or_refused_and_never_run(text: str) -> None:
    def executed(*_: object, **__: object) -> None:
        raise AssertionError(f"{text!r} was executed")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("eval", "exec", "open", "print", "getattr"):
            patch.setattr(builtins, name, executed)
        started = time.perf_counter()
        try:
            value = evaluate(text)
        except ArithmeticFault:
            value = None
        seconds = time.perf_counter() - started
    assert seconds < 1.0
    if value is not None:
        assert value.numerator.bit_length() <= MAX_BITS
        assert value.denominator.bit_length() <= MAX_BITS
        nodes = {type(node).__name__ for node in ast.walk(ast.parse(text_as_read(text)))}
        assert not nodes & {"Call", "Attribute", "Name", "Subscript", "Lambda", "List", "Tuple"}


def text_as_read(text: str) -> str:
    return text.strip().replace("$", "").replace(",", "").replace("^", "**")


@settings(max_examples=200, deadline=None)
@given(st.fractions(max_denominator=10**6))
def test_an_exact_value_is_written_to_ten_digits(value: Fraction) -> None:
    written = Fraction(as_text(value))
    assert abs(written - value) <= Fraction(6, 10**10) * max(abs(value), 1)
