"""Tests of the period of a model's blocks."""

import pytest

from lightning_jax.models.shape import Attention, Block, DecoderShape, Dense, Rope

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


def test_equal_shapes_are_one_argument_of_a_program() -> None:
    one, same, other = (
        DecoderShape(8, 32, (Block(Attention(4, 2, 8, rope), Dense(16)),) * 2)
        for rope in (Rope(), Rope(), None)
    )
    assert (one, hash(one)) == (same, hash(same))
    assert one != other
