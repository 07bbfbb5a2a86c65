"""Tests of the comparison of two results, against values worked by hand."""

import pytest

from lightning_jax.rollouts.results.compare_tasks import compare_tasks, sign_test


@pytest.mark.parametrize(
    ("won", "lost", "p_value"),
    [
        (0, 0, 1.0),
        (1, 0, 1.0),  # one toss shows nothing
        (5, 0, 2 / 2**5),
        (0, 5, 2 / 2**5),
        (8, 2, 2 * (1 + 10 + 45) / 2**10),
        (3, 3, 1.0),
        (4, 3, 1.0),
        (1500, 0, 0.0),
    ],
)
def test_sign_test_is_the_exact_binomial(won: int, lost: int, p_value: float) -> None:
    assert sign_test(won, lost) == pytest.approx(p_value, rel=1e-12)


def test_tasks_are_won_lost_and_equal() -> None:
    before = {"a": [0.0, 0.5], "b": [1.0], "c": [0.1] * 3, "d": [0.5], "gone": [1.0], "x": [1.0]}
    after = {"new": [0.0], "d": [0.75], "c": [0.1], "b": [0.0], "a": [0.5], "x": []}
    found = compare_tasks(before, after)
    changes = [(change.task_id, change.before, change.after) for change in found.changes[:3]]
    assert changes == [("b", 1.0, 0.0), ("a", 0.25, 0.5), ("d", 0.5, 0.75)]
    assert (found.num_won, found.num_lost, found.num_equal) == (2, 1, 1)
    assert (found.num_only_before, found.num_only_after) == (2, 1)
    # Changes -1, 0.25, 0.25 and 0: mean -0.125, sum of squared deviations 1.0625.
    assert found.change_mean == pytest.approx(-0.125)
    assert found.change_stderr == pytest.approx((1.0625 / 3 / 4) ** 0.5)
    assert found.p_value == 1.0


def test_one_common_task_has_no_error_and_none_has_no_mean() -> None:
    one = compare_tasks({"a": [0.0]}, {"a": [1.0]})
    assert (one.change_mean, one.change_stderr, one.num_won, one.p_value) == (1.0, 0.0, 1, 1.0)
    none = compare_tasks({"a": [0.0]}, {"b": [1.0]})
    assert (none.change_mean, none.change_stderr, none.changes) == (None, None, ())
    assert (none.num_only_before, none.num_only_after) == (1, 1)
