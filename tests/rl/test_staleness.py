"""Test that calls from old weights are dropped."""

from dataclasses import replace

from lightning_jax.rl.staleness import drop_stale, newest_version
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


def test_newest_version_is_that_of_the_trained_call_that_is_stale_last():
    """A call is as old as its oldest token, so version 4 of the second call does not count."""
    old, mixed = transition([1], [2], version=2), transition([1], [2, 3], version=3)
    mixed = replace(mixed, policy_versions=(3, 4))
    frozen = transition([1], [2], version=9, trains=False)
    assert newest_version([old, mixed, frozen]) == 3
    assert newest_version([old]) == 2
    assert newest_version([frozen]) is newest_version([]) is None
