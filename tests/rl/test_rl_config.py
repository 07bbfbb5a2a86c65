"""Tests of the sizes of batches that follow from others."""

import pytest

from lightning_jax.rl.config import BatchConfig


@pytest.mark.parametrize(
    ("vocab_size", "targets", "chunk"),
    [
        (259, 1024, 256),
        (49152, 1024, 256),
        (98304, 1024, 128),  # twice as many logits a target
        (151936, 1024, 64),  # 82.8 are nearer to 64 than to 128 as factors
        (262208, 1024, 64),  # 48.0
        (262208, 1000, 50),  # divides 250
        (262208, 509, 509),  # a prime, far from 1
    ],
)
def test_logits_of_a_chunk_take_as_much_memory_for_any_vocabulary(
    vocab_size: int, targets: int, chunk: int
) -> None:
    config = BatchConfig(max_targets=targets).with_sizes(64)
    assert config.chunk_of(vocab_size) == chunk
    assert config.largest_chunk % chunk == 0
    fixed = BatchConfig(max_targets=1024, head_chunk=512).with_sizes(64)
    assert fixed.chunk_of(vocab_size) == 512
