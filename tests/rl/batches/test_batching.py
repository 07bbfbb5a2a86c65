import dataclasses
from collections import Counter

import numpy as np
from coded import raises_coded
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_jax.errors import InvalidValue
from lightning_jax.rl.batches.batching import (
    make_batches,
    make_sequences,
    make_supervised_sequences,
)
from lightning_jax.rl.config import BatchConfig
from lightning_jax.rl.sequence import StateValues
from lightning_jax.rl.token_weights import split_minibatches
from lightning_jax.testing.records import sequence, trajectory, transition

SMALL = BatchConfig(rows=1, row_len=16, max_targets=8, head_chunk=4)


def read_back(batches):
    """Count the targets as (context, token, log-prob, advantage, weight).

    The context is all tokens that the predicting node sees, in order of position.
    """
    found = Counter()
    for batch in batches:
        for b, r in zip(*np.nonzero(batch.target_mask), strict=True):
            node = int(batch.target_nodes[b, r])
            sees = [j for j in range(node + 1) if node < batch.ends[b, j]]
            assert [int(batch.positions[b, j]) for j in sees] == list(range(len(sees)))
            context = tuple(int(batch.tokens[b, j]) for j in sees)
            numbers = (batch.behavior_logprobs, batch.advantages, batch.weights)
            values = tuple(float(array[b, r]) for array in numbers)
            found[context, int(batch.target_ids[b, r]), *values] += 1
        check_distinct(batch)
    return found


def check_distinct(batch):
    """Check that each target maps to its own pair, and that each pair occurs once."""
    nodes, ids = batch.distinct.nodes, batch.distinct.ids
    for b, mask in enumerate(batch.target_mask):
        indices = batch.distinct.of_targets[b, mask]
        np.testing.assert_array_equal(nodes[b, indices], batch.target_nodes[b, mask])
        np.testing.assert_array_equal(ids[b, indices], batch.target_ids[b, mask])
        pairs = list(zip(nodes[b], ids[b], strict=True))[: (ids[b] >= 0).sum()]
        assert len(set(pairs)) == len(pairs) == len(set(indices))


def expected_targets(sequences):
    expected = Counter()
    for s in sequences:
        for i, token in enumerate(s.response_token_ids):
            if not s.loss_mask[i]:
                continue
            context = s.prompt_token_ids + s.response_token_ids[:i]
            numbers = (s.behavior_logprobs[i], s.advantage, s.weight)
            expected[context, token, *(float(np.float32(x)) for x in numbers)] += 1
    return expected


def test_layout_by_hand():
    # Paths in depth-first order: 5 6 7 (the 8 is only predicted), 5 6 7 8 4 and 5 9.
    sequences = [sequence([5, 6], [7, 8]), sequence([5, 6, 7, 8, 4], [3]), sequence([5], [9, 1])]
    (batch,), stats = make_batches(sequences, SMALL)
    assert batch.tokens[0, :7].tolist() == [5, 6, 7, 8, 4, 9, 0]
    assert batch.positions[0, :7].tolist() == [0, 1, 2, 3, 4, 1, 0]
    assert batch.ends[0].tolist() == [6, 5, 5, 5, 5, 6, *range(7, 17)]
    assert batch.target_nodes[0].tolist() == [1, 2, 4, 0, 5, 0, 0, 0]
    assert batch.target_ids[0].tolist() == [7, 8, 3, 9, 1, 0, 0, 0]
    assert batch.target_mask[0].tolist() == [True] * 5 + [False] * 3
    assert stats["train/tokens_naive"] == 3 + 5 + 2
    assert stats["train/tokens_forest"] == 6
    assert stats["train/padding_share"] == 1 - 6 / 16
    assert stats["train/targets_share"] == 5 / 8
    assert stats["train/num_sequences"] == 3


def test_the_same_sample_twice_shares_nodes_but_not_targets():
    sequences = [sequence([1, 2], [3, 4], advantage=a) for a in (1.0, -1.0)]
    batches, stats = make_batches(sequences, SMALL)
    assert stats["train/tokens_forest"] == 3
    assert read_back(batches) == expected_targets(sequences)
    assert batches[0].target_mask.sum() == 4


def test_the_head_is_read_once_for_what_siblings_sampled_alike():
    # Node 1 predicts 3, 3 and 7. Node 2, which has read the 3, predicts 4 and 5.
    sequences = [sequence([1, 2], response) for response in ([3, 4], [3, 5], [7])]
    (batch,), stats = make_batches(sequences, SMALL)
    assert batch.target_ids[0, :5].tolist() == [7, 3, 4, 3, 5]
    assert batch.distinct.nodes[0].tolist() == [1, 1, 2, 2, 0, 0, 0, 0]
    assert batch.distinct.ids[0].tolist() == [3, 7, 4, 5, -1, -1, -1, -1]
    assert batch.distinct.of_targets[0, :5].tolist() == [1, 0, 2, 0, 3]
    assert stats["train/num_distinct_targets"] == 4
    assert batch.distinct.temperatures is None  # all 1


def test_what_was_sampled_alike_at_other_temperatures_is_read_for_each() -> None:
    sequences = [dataclasses.replace(sequence([1, 2], [3]), temperature=t) for t in (0.5, 1.0, 0.5)]
    (batch,), stats = make_batches(sequences, SMALL)
    assert stats["train/num_distinct_targets"] == 2
    assert batch.distinct.ids[0, :3].tolist() == [3, 3, -1]
    found = batch.distinct.temperatures[0, batch.distinct.of_targets[0, :3]]
    assert sorted(found.tolist()) == [0.5, 0.5, 1.0]
    assert batch.distinct.temperatures[0, 2:].tolist() == [1.0] * 6


def test_a_call_is_learned_from_at_its_own_temperature() -> None:
    cold = dataclasses.replace(
        transition([1], [2, 3]), temperature=0.5, tempered_logprobs=(-0.01, -0.02)
    )
    calls = trajectory(transition([1], [2, 3]), cold)
    plain, tempered = make_sequences([calls], [(1.0, 1.0)])
    assert (plain.temperature, plain.behavior_logprobs) == (1.0, (-0.1, -0.2))
    assert (tempered.temperature, tempered.behavior_logprobs) == (0.5, (-0.01, -0.02))


def test_a_multi_turn_conversation_is_one_path():
    turns = [sequence([1, 2], [3, 4]), sequence([1, 2, 3, 4, 5], [6]), sequence([1, 2, 3, 9], [7])]
    batches, stats = make_batches(turns, SMALL)
    assert stats["train/tokens_forest"] == 6  # 1 2 3 4 5 and the fork 9
    assert read_back(batches) == expected_targets(turns)


def test_a_split_trie_is_still_exact():
    sequences = [sequence([1, 2, 3, 4, 5, 6, 7, 8], [k, k, k]) for k in range(10, 20)]
    batches, stats = make_batches(sequences, SMALL)
    assert len(batches) > 1
    assert read_back(batches) == expected_targets(sequences)
    assert stats["train/num_rows"] == len(batches)


def test_rows_of_one_batch_and_the_last_one_filled_with_padding():
    config = BatchConfig(rows=2, row_len=16, max_targets=8, head_chunk=4)
    sequences = [sequence([k] * 14, [k, k]) for k in range(1, 4)]
    batches, stats = make_batches(sequences, config)
    assert [batch.tokens.shape for batch in batches] == [(2, 16), (2, 16)]
    assert read_back(batches) == expected_targets(sequences)
    assert stats["train/padding_share"] == 1 - 3 * 15 / 64
    np.testing.assert_array_equal(batches[1].ends[1], np.arange(1, 17))
    assert batches[1].target_mask[1].sum() == 0


def test_drops_are_counted_by_reason_and_in_tokens():
    sequences = [
        sequence([1] * 15, [2]),  # reads 15 tokens
        sequence([1] * 16, [2]),  # reads 16, just fits
        sequence([1] * 16, [2, 3]),  # too long
        sequence([1], [2] * 9),  # too many targets
        sequence([1], []),
        sequence([1], [2], advantage=0.0),
        sequence([1], [2, 3], loss_mask=(False, False)),
    ]
    batches, stats = make_batches(sequences, SMALL, skip_zero_advantage=True)
    dropped = {name: value for name, value in stats.items() if "dropped" in name}
    assert dropped == {
        "train/dropped_too_long": 1.0,
        "train/dropped_too_many_targets": 1.0,
        "train/dropped_empty_response": 1.0,
        "train/dropped_all_forced": 1.0,
        "train/dropped_zero_advantage": 1.0,
        "train/dropped_tokens": 12.0,
    }
    assert read_back(batches) == expected_targets(sequences[:2])


def test_nothing_to_train_on_makes_no_batch():
    batches, stats = make_batches([], SMALL)
    assert batches == []
    assert stats["train/padding_share"] == 0.0


def test_weights_make_rollouts_count_alike_and_sum_to_one():
    step = [
        trajectory(transition([1], [2, 3]), transition([1, 2, 3], [4, 5])),
        trajectory(transition([1], [6])),
        trajectory(),  # no call, so no weight
    ]
    sequences = make_sequences(step, [(0.5, 1.5), (-1.0,), ()])
    assert [s.weight for s in sequences] == [1 / 8, 1 / 8, 1 / 2]
    assert [s.advantage for s in sequences] == [0.5, 1.5, -1.0]
    assert sum(s.weight * len(s.response_token_ids) for s in sequences) == 1.0


def test_forced_tokens_are_context_and_no_targets():
    # 2 of 4 sampled tokens are forced. The other 2 are targets of weight 1/2 (one rollout).
    forced = (False, True, False, True)
    step = [trajectory(transition([5], [6, 7, 8, 9], forced=forced))]
    sequences = make_sequences(step, [(2.0,)])
    assert [(s.weight, s.loss_mask) for s in sequences] == [(1 / 2, (True, False, True, False))]
    (batch,), stats = make_batches(sequences, SMALL)
    assert batch.tokens[0, :4].tolist() == [5, 6, 7, 0]  # 7 is read, 8 only predicted, 9 neither
    assert batch.target_nodes[0, :3].tolist() == [0, 2, 0]
    assert batch.target_ids[0, :3].tolist() == [6, 8, 0]
    assert batch.target_mask[0].tolist() == [True] * 2 + [False] * 6
    assert batch.weights[0, :3].tolist() == [0.5, 0.5, 0.0]
    np.testing.assert_allclose(batch.behavior_logprobs[0, :3], [-0.1, -0.3, 0.0])
    assert stats["train/tokens_forced"] == 2
    assert stats["train/tokens_forest"] == 3


def test_weights_count_only_trained_tokens():
    step = [
        trajectory(
            transition([1], [2, 3], forced=(True, False)), transition([1], [4], forced=(True,))
        ),
        trajectory(transition([1], [6, 7])),
        trajectory(transition([1], [8], forced=(True,))),  # no trained token, so it does not count
    ]
    sequences = make_sequences(step, [(1.0, 1.0), (-1.0,), (1.0,)])
    weights = [s.weight for s in sequences for trained in s.loss_mask if trained]
    assert weights == [1 / 2, 1 / 4, 1 / 4]


def test_advantages_must_match_calls():
    with raises_coded(InvalidValue, "mismatch"):
        make_sequences([trajectory(transition([1], [2]))], [(1.0, 2.0)])


def test_supervised_tokens_weigh_alike():
    sequences = make_supervised_sequences([([1, 2], [3]), ([1], [4, 5, 6])])
    assert [s.weight for s in sequences] == [0.25, 0.25]
    assert sequences[1].response_token_ids == (4, 5, 6)


tokens = st.integers(1, 3)
# Each response token comes with a flag that is True if the token is trained.
responses = st.lists(st.tuples(tokens, st.booleans()), min_size=1, max_size=6)
pair_lists = st.lists(st.tuples(st.lists(tokens, min_size=1, max_size=9), responses), max_size=20)


@settings(max_examples=150, deadline=None)
@given(pair_lists, st.integers(1, 3), st.randoms())
def test_every_sampled_token_is_trained_once_in_its_own_context(pairs, rows, random):
    sequences = []
    for prompt, response in pairs:
        ids, mask = zip(*response, strict=True)
        sequences.append(sequence(prompt, list(ids), loss_mask=mask))
    config = BatchConfig(rows=rows, row_len=16, max_targets=8, head_chunk=8)
    batches, stats = make_batches(sequences, config)
    assert read_back(batches) == expected_targets(sequences)
    num_forced = sum(s.loss_mask.count(False) for s in sequences)
    assert stats["train/tokens_forced"] == num_forced
    shuffled = sequences[:]
    random.shuffle(shuffled)
    again, _ = make_batches(shuffled, config)
    assert read_back(again) == read_back(batches)
    assert stats["train/tokens_forest"] <= stats["train/tokens_naive"]


def test_targets_know_their_sequence_and_lie_side_by_side():
    # Sorted by path, the third comes first. The second is dropped because it has no target.
    sequences = [sequence([5, 6], [7, 8]), sequence([1], []), sequence([4], [3, 2, 1])]
    (batch,), _ = make_batches(sequences, SMALL)
    assert batch.target_calls[0].tolist() == [2, 2, 2, 0, 0, -1, -1, -1]
    assert batch.old_logprobs is None


def test_a_step_with_an_empty_response_and_a_rollout_without_calls():
    step = [trajectory(transition([1], [])), trajectory(), trajectory(transition([1], [2]))]
    for aggregation in ("rollout", "call", "token", "constant"):
        sequences = make_sequences(step, [(1.0,), (), (1.0,)], aggregation=aggregation)
        (batch,), stats = make_batches(sequences, SMALL)
        assert batch.weights[0].tolist() == [1.0] + [0.0] * 7
        assert stats["train/dropped_empty_response"] == 1.0


def test_states_lie_beside_targets():
    """Check one state at the end of a call's prompt, and one state for each trained token."""
    made = [
        dataclasses.replace(
            sequence([1, 2], [5, 6, 7], loss_mask=(False, True, True)),
            states=StateValues(positions, values, returns, weight=0.5),
        )
        for positions, values, returns in (
            ((0,), (0.25,), (1.0,)), ((1, 2), (0.5, 0.75), (2.0, 3.0))
        )
    ]  # fmt: skip
    shape = BatchConfig(rows=1, row_len=16, max_targets=8, head_chunk=4)
    (batch,), _ = make_batches(made, shape)
    # The path 1 2 5 6 occurs once. Nodes 2 and 3 predict the two targets of each call.
    assert batch.target_nodes[0, :4].tolist() == [2, 3, 2, 3]
    assert batch.states.nodes[0].tolist() == [1, 0, 2, 3, 0, 0, 0, 0]
    assert batch.states.weights[0].tolist() == [0.5, 0, 0.5, 0.5, 0, 0, 0, 0]
    assert batch.states.values[0, :4].tolist() == [0.25, 0, 0.5, 0.75]
    assert batch.states.returns[0, :4].tolist() == [1, 0, 2, 3]
    (plain,), _ = make_batches([sequence([1], [2])], shape)
    assert plain.states is None


def test_tokens_may_have_advantages_of_their_own():
    made = sequence([1], [5, 6, 7], advantage=(0.5, -1.0), loss_mask=(True, False, True))
    (batch,), _ = make_batches([made], SMALL, skip_zero_advantage=True)
    assert batch.advantages[0, :3].tolist() == [0.5, -1.0, 0.0]


def test_all_states_weigh_the_same():
    step = [
        trajectory(transition([1], [2]), transition([1], [3])),
        trajectory(transition([1], [4])),
    ]
    states = [
        (StateValues((0,), (0.0,), (0.0,)), None),
        (StateValues((0, 1, 2), (0.0,) * 3, (0.0,) * 3),),
    ]
    sequences = make_sequences(step, [(1.0, 1.0), (1.0,)], states=states)
    assert [call.states and call.states.weight for call in sequences] == [0.25, None, 0.25]
    first, second = split_minibatches(sequences, 2)
    weights = [sequence.states and sequence.states.weight for sequence in (*first, *second)]
    assert weights in ([0.5, None, 0.5], [0.5, 0.5, None])
