"""Tests of the split of tasks that come without one."""

import pytest

from lightning_jax.environments.split import indices_of, part_of


@pytest.mark.parametrize(("number", "num_dev"), [(0, 0), (1, 1), (2, 1), (4, 1), (10, 2), (99, 19)])
def test_a_fixed_fifth_is_dev(number: int, num_dev: int) -> None:
    dev, train = indices_of("dev", number), indices_of("train", number)
    assert len(dev) == num_dev and sorted([*dev, *train]) == list(range(number))
    assert dev == indices_of("dev", number)


def test_parts_keep_the_order() -> None:
    tasks = [f"task {i}" for i in range(10)]
    assert part_of("train", tasks) == [tasks[i] for i in indices_of("train", 10)]
