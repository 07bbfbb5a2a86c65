"""Tests of the batch rows that stored calls are put into."""

from lightning_jax.cli.verify.calls import StoredCall
from lightning_jax.cli.verify.compare import _batch
from lightning_jax.testing.records import transition


def test_a_row_holds_one_call_and_targets_name_their_nodes() -> None:
    batch = _batch([StoredCall(transition([5, 6, 7], [8, 9]), True)], 2, 64)
    assert batch.tokens[0, :6].tolist() == [5, 6, 7, 8, 9, 0]
    assert batch.ends[0, :6].tolist() == [5, 5, 5, 5, 5, 6]  # padding attends only to itself
    # Node 2 (token 7) predicts 8, node 3 (token 8) predicts 9.
    assert batch.target_nodes[0, :2].tolist() == [2, 3]
    assert batch.target_ids[0, :2].tolist() == [8, 9]
    assert batch.target_mask.sum(axis=1).tolist() == [2, 0]
