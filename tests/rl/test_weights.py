import pytest

from lightning_jax.rl.weights import split_minibatches, token_weights
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
    with pytest.raises(ValueError, match="'mean'; expected rollout, token, call or constant"):
        token_weights(STEP, aggregation="mean")


def test_minibatches_are_stretches_whose_weights_grow():
    sequences = [sequence([1], [k], weight=0.1) for k in range(5)]
    parts = split_minibatches(sequences, 2)
    assert [[s.response_token_ids[0] for s in part] for part in parts] == [[0, 1], [2, 3, 4]]
    assert {s.weight for part in parts for s in part} == {0.2}
    assert split_minibatches(sequences, 1) == [sequences]
    assert [len(part) for part in split_minibatches(sequences[:2], 4)] == [1, 1]
    assert split_minibatches([], 3) == [[]]
