import itertools
from dataclasses import replace

import pytest
from coded import raises_coded
from hypothesis import given
from hypothesis import strategies as st

from lightning_jax.errors import InvalidValue
from lightning_jax.rl.batches.batching import make_sequences
from lightning_jax.rl.token_weights import (
    drop_stale,
    newest_version,
    split_minibatches,
    token_weights,
)
from lightning_jax.testing.records import sequence, trajectory, transition

# Rollouts with calls of 1 and 3 tokens, of 2 tokens, and without calls.
STEP = [
    trajectory(transition([1], [2]), transition([1], [3, 4, 5])),
    trajectory(transition([1], [6, 7])),
    trajectory(),
]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("rollout", [(1 / 8, 1 / 8), (1 / 4,), ()]),  # 2 rollouts of 4 and 2 tokens
        ("call", [(1 / 3, 1 / 9), (1 / 6,), ()]),  # 3 calls of 1, 3 and 2 tokens
        ("token", [(1 / 6, 1 / 6), (1 / 6,), ()]),  # 6 tokens
        ("constant", [(1 / 20, 1 / 20), (1 / 20,), ()]),  # 2 rollouts, divisor 10
    ],
)
def test_weights_by_hand(aggregation, expected):
    assert token_weights(STEP, aggregation=aggregation, divisor=10.0) == expected


@pytest.mark.parametrize("aggregation", ["rollout", "call", "token"])
def test_weights_sum_to_one_over_trained_tokens(aggregation):
    step = [
        trajectory(transition([1], [2, 3], forced=(True, False)), transition([1], [])),
        trajectory(transition([1], [4, 5, 6])),
        trajectory(transition([1], [7], forced=(True,))),  # nothing to train
    ]
    weights = token_weights(step, aggregation=aggregation)
    assert [len(calls) for calls in weights] == [2, 1, 1]
    trained = [(1, 0), (3,), (0,)]
    total = sum(
        w * n for ws, ns in zip(weights, trained, strict=True) for w, n in zip(ws, ns, strict=True)
    )
    assert total == pytest.approx(1.0)


@pytest.mark.parametrize("aggregation", ["rollout", "call", "token", "constant"])
def test_nothing_to_weigh(aggregation):
    assert token_weights([], aggregation=aggregation) == []
    assert token_weights([trajectory()], aggregation=aggregation) == [()]


def test_another_aggregation_is_refused():
    with raises_coded(InvalidValue, "unknown", "aggregation"):
        token_weights(STEP, aggregation="mean")


def numbers(parts):
    return [[call.response_token_ids[0] for call in part] for part in parts]


def of_rollouts(sizes: dict[str, list[int]]):
    """Build sequences of groups from each rollout's number of calls. Responses are 0, 1, 2, ..."""
    rollouts = [(name, size) for name, of_group in sizes.items() for size in of_group]
    count = itertools.count()
    step = [
        trajectory(*(transition([1], [next(count)]) for _ in range(size)), group=name)
        for name, size in rollouts
    ]
    return make_sequences(step, [(1.0,) * size for _, size in rollouts])


def test_minibatches_are_shuffled_and_their_weights_grow():
    sequences = [sequence([1], [k], weight=0.1) for k in range(5)]
    parts = split_minibatches(sequences, 2, "seed")
    assert sorted(map(len, parts)) == [2, 3]
    assert sorted(itertools.chain(*numbers(parts))) == [0, 1, 2, 3, 4]
    assert {s.weight for part in parts for s in part} == {0.2}
    assert numbers(split_minibatches(sequences, 2, "seed")) == numbers(parts)
    others = [numbers(split_minibatches(sequences, 2, str(seed))) for seed in range(9)]
    assert any(other != numbers(parts) for other in others)
    assert split_minibatches(sequences, 1) == [sequences]
    assert [len(part) for part in split_minibatches(sequences[:2], 4)] == [1, 1]
    assert split_minibatches([], 3) == [[]]


@pytest.mark.parametrize("seed", ["a", "b", "c", "d"])
def test_minibatches_keep_groups_whole(seed):
    sequences = of_rollouts({"g": [1, 1], "h": [3, 3], "i": [1, 1], "j": [1, 1]})
    parts = numbers(split_minibatches(sequences, 3, seed))
    groups = ({0, 1}, set(range(2, 8)), {8, 9}, {10, 11})
    assert len(parts) == 3 and all(parts)
    for group in groups:
        assert sum(bool(group & set(part)) for part in parts) == 1
    large = next(part for part in parts if 2 in part)
    assert [token for token in large if 2 <= token < 8] == list(range(2, 8))  # calls in order


def test_a_rollout_is_never_split():
    sequences = of_rollouts({"g": [3, 2, 1]})  # one group for several parts
    for number in (2, 3, 9):
        parts = numbers(split_minibatches(sequences, number))
        assert len(parts) == min(number, 3) and all(parts)
        for rollout in ({0, 1, 2}, {3, 4}, {5}):
            assert sum(bool(rollout & set(part)) for part in parts) == 1


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.integers(2, 9), st.text(max_size=3))
def test_no_minibatch_is_empty(sizes, number, seed):
    sequences = of_rollouts({str(k): [size] for k, size in enumerate(sizes)})
    parts = split_minibatches(sequences, number, seed)
    assert len(parts) == min(number, len(sizes)) and all(parts)
    assert sorted(itertools.chain(*numbers(parts))) == list(range(sum(sizes)))


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
