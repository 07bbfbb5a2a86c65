"""Tests of the period of a model's blocks."""

import math

import pytest
from coded import raises_coded

from lightning_jax.errors import InvalidValue
from lightning_jax.models.shape import Attention, Block, DecoderShape, Dense, Norm, Rope

LOCAL, GLOBAL = (Block(Attention(4, 2, 8, rope), Dense(16)) for rope in (Rope(), None))


@pytest.mark.parametrize(
    ("blocks", "period"),
    [
        ((LOCAL,), 1),
        ((LOCAL,) * 5, 1),
        ((LOCAL, GLOBAL) * 3, 2),
        ((LOCAL, GLOBAL, LOCAL, GLOBAL, LOCAL), 2),  # the last one is cut
        ((LOCAL, LOCAL, GLOBAL) * 2, 3),
        ((GLOBAL, LOCAL, LOCAL), 3),
    ],
)
def test_blocks_repeat_after_their_period(blocks: tuple[Block, ...], period: int) -> None:
    shape = DecoderShape(8, 32, blocks)
    assert (shape.period, shape.num_layers) == (period, len(blocks))
    assert set(shape.distinct_blocks) == set(blocks)


def test_even_context_of_windows_by_hand() -> None:
    def context(*windows: int | None) -> float:
        blocks = tuple(Block(Attention(2, 1, 4, window=size), Dense(8)) for size in windows)
        return DecoderShape(8, 32, blocks).even_context

    # A layer has 32 * (2 * 3 * 4 + 3 * 8) = 1,536 weights and queries of 8 numbers: 1,536 * 2
    # operations are those of 96 tokens of 4 * 8.
    assert context(None) == context(None, None) == context(100, None) == 96.0
    # Each layer sees 60 tokens, and the second one all others.
    assert context(60, None) == 60 + 2 * (96 - 60)
    assert context(60, 100) == math.inf
    assert context(60, 140) == 132.0


def test_windows_have_at_least_one_token() -> None:
    with raises_coded(InvalidValue, "out_of_range", "window"):
        Attention(2, 1, 4, window=0)


def test_equal_shapes_are_one_argument_of_a_program() -> None:
    one, same, other = (
        DecoderShape(8, 32, (Block(Attention(4, 2, 8, rope), Dense(16)),) * 2)
        for rope in (Rope(), Rope(), None)
    )
    assert (one, hash(one)) == (same, hash(same))
    assert one != other


def test_scales_with_an_offset_multiply_in_float32() -> None:
    with raises_coded(InvalidValue, "mismatch", "offset"):
        Norm(offset=1.0)
