import numpy as np
import pytest
from coded import raises_coded
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_jax.errors import InvalidValue
from lightning_jax.rl.batches.packing import PathForest, common_prefix, pack_rows

PREFIX = list(range(100, 110))


def forest(*paths: list[int], num_targets: int = 1) -> PathForest:
    ordered = [np.asarray(path, np.int32) for path in sorted(paths)]
    return PathForest(ordered, [num_targets] * len(ordered))


def trie_size(paths: list[list[int]]) -> int:
    return len({tuple(path[: i + 1]) for path in paths for i in range(len(path))})


def test_common_prefix():
    a, b = np.asarray([1, 2, 3]), np.asarray([1, 2, 4])
    assert common_prefix(a, b) == 2
    assert common_prefix(a, a) == 3
    assert common_prefix(a[:1], a) == 1
    assert common_prefix(a, b[2:]) == 0


def test_a_trie_that_fits_stays_in_one_row():
    rows = pack_rows(
        forest([*PREFIX, 1], [*PREFIX, 2], [*PREFIX, 2, 3]), max_nodes=13, max_targets=9
    )
    assert [(row.members, row.nodes, row.targets) for row in rows] == [([0, 1, 2], 13, 3)]


@pytest.mark.parametrize(
    ("paths", "max_nodes", "nodes"),
    [
        # A split trie repeats its prefix once per row: 10 shared tokens and 8 branches of 5 are 50
        # nodes. They fit two rows of 30 = 10 + 4 * 5.
        ([PREFIX + [branch] * 5 for branch in range(8)], 30, [30, 30]),
        # The emptiest row is dissolved into the gaps of others: of three tries of 10 + 2 * 5 = 20
        # nodes, no two fit into a row of 36. But 20 + 15 = 35 fit, so two rows suffice.
        ([[t] * 10 + [branch] * 5 for t in range(3) for branch in (7, 8)], 36, [35, 35]),
    ],
)
def test_tries_fill_rows(paths, max_nodes, nodes):
    rows = pack_rows(forest(*paths), max_nodes=max_nodes, max_targets=99)
    assert sorted(row.nodes for row in rows) == nodes


def test_the_number_of_targets_splits_too():
    rows = pack_rows(forest(*[[1, 2, 3]] * 4, num_targets=2), max_nodes=100, max_targets=4)
    assert [(row.nodes, row.targets) for row in rows] == [(3, 4), (3, 4)]


def test_a_path_that_fits_nowhere_is_refused():
    with raises_coded(InvalidValue, "too_large"):
        pack_rows(forest([1, 2, 3, 4, 5]), max_nodes=4, max_targets=9)


def test_a_very_deep_trie_needs_no_recursion():
    # Each path extends the last one, which gives 1500 nested branch points.
    paths = [[1] * length for length in range(1, 1501)]
    rows = pack_rows(forest(*paths), max_nodes=1500, max_targets=500)
    assert len(rows) == 3


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=9), max_size=25),
    st.integers(9, 20),
    st.integers(2, 9),
)
def test_every_path_is_packed_once_and_rows_keep_their_limits(paths, max_nodes, max_targets):
    paths = sorted(paths)
    rows = pack_rows(forest(*paths, num_targets=2), max_nodes=max_nodes, max_targets=max_targets)
    assert sorted(i for row in rows for i in row.members) == list(range(len(paths)))
    for row in rows:
        assert row.members == sorted(row.members)
        assert row.nodes == trie_size([paths[i] for i in row.members]) <= max_nodes
        assert row.targets == 2 * len(row.members) <= max_targets
