"""Test that calls from old weights are dropped."""

from lightning_jax.rl.staleness import drop_stale
from lightning_jax.testing.records import trajectory, transition


def test_stale_calls_are_dropped_and_counted():
    old, new = transition([1], [2], version=3), transition([1], [3], version=5)
    step, advantages, num_dropped = drop_stale(
        [trajectory(old, new), trajectory(old)],
        [(1.0, 2.0), (3.0,)],
        policy_version=7,
        max_staleness=2,
    )
    assert [t.transitions for t in step] == [(new,), ()]
    assert advantages == [(2.0,), ()]
    assert num_dropped == 2
