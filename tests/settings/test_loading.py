"""Tests of loading functions that settings name as FILE:FUNCTION."""

import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from coded import raises_coded

from lightning_jax.settings import ConfigError
from lightning_jax.settings.loading import (
    check_reference,
    indices_of,
    is_installed,
    load_function,
    part_of,
)

TOY = Path(__file__).parents[1] / "toy_agent.py"


@pytest.mark.parametrize(
    ("reference", "reason", "key"),
    [
        ("nowhere.py:run", "not_found", "nowhere.py"),
        (f"{TOY}:walk", "no_such_function", "walk"),
        ("no_such_module:run", "not_loaded", "no_such_module:run"),
        ("json:no_such_function", "not_loaded", "json:no_such_function"),
        ("__main__:<lambda>", "not_loaded", "__main__:<lambda>"),
    ],
)
def test_a_wrong_reference_is_explained(reference: str, reason: str, key: str) -> None:
    with raises_coded(ConfigError, reason, key):
        load_function(reference)


@pytest.mark.parametrize("name", ["no_such_module", "no_such_module.inner", "json.no_such"])
def test_a_missing_module_is_not_installed(name: str) -> None:
    assert not is_installed(name)
    assert is_installed("json.decoder")


def test_a_function_of_a_module_is_loaded() -> None:
    assert load_function("os.path:join") is os.path.join


def test_a_file_is_loaded_once() -> None:
    assert load_function(f"{TOY}:run").__globals__ is load_function(f"{TOY}:odd").__globals__


def test_processes_that_an_agent_starts_can_import_it(tmp_path: Path) -> None:
    path = tmp_path / "agent_of_workers.py"
    source = "def double(x):\n    return 2 * x\n"
    path.write_text(source)
    double = load_function(f"{path}:double")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(double, 21).result() == 42
    path.write_text(source.replace("2 *", "3 *"))
    os.utime(path, ns=(0, 0))  # a different time even on a coarse clock
    assert load_function(f"{path}:double")(2) == 6


@pytest.mark.parametrize("name", ["types", "no-name", "numpy"])
def test_a_file_named_as_another_module_hides_it_from_nobody(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"{name}.py"
    path.write_text("def run():\n    return 1\n")
    before = sys.modules.get(name)
    assert load_function(f"{path}:run")() == 1
    assert sys.modules.get(name) is before


def test_an_agent_whose_framework_is_missing_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    path.write_text("import no_such_framework\n\nasync def run(task, llm):\n    return 0.0\n")
    for _ in range(2):  # the broken module is not cached
        with raises_coded(ConfigError, "not_loaded", str(path)) as caught:
            load_function(f"{path}:run")
        assert "no_such_framework" in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "async def run(task, llm): ...",
        "import no_such_package as run",
        "if True:\n    from no_such_package import run",
        "run = lambda task, llm: 1.0",
        "from no_such_package import *",
        "def __getattr__(name): ...",
        "globals()['run'] = print",
        "print 'another Python'",
        "class run:\n    pass",
    ],
)
def test_a_file_that_may_define_the_function_is_not_refused(source: str, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(source)
    check_reference(f"{tmp_path}/agent.py:run")
    check_reference("a_module:run")


def test_a_file_without_the_function_is_refused_unread(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("raise SystemExit\nrun()\n")
    with raises_coded(ConfigError, "no_such_function", "run"):
        check_reference(f"{tmp_path}/agent.py:run")
    with raises_coded(ConfigError, "not_found", "nowhere.py"):
        check_reference("nowhere.py:run")


@pytest.mark.parametrize(("number", "num_dev"), [(0, 0), (1, 1), (2, 1), (4, 1), (10, 2), (99, 19)])
def test_a_fixed_fifth_is_dev(number: int, num_dev: int) -> None:
    dev, train = indices_of("dev", number), indices_of("train", number)
    assert len(dev) == num_dev and sorted([*dev, *train]) == list(range(number))
    assert dev == indices_of("dev", number)


def test_parts_keep_the_order() -> None:
    tasks = [f"task {i}" for i in range(10)]
    assert part_of("train", tasks) == [tasks[i] for i in indices_of("train", 10)]
