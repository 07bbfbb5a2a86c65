"""Tests of tasks of `verifiers`: errors without the package, and a toy task set with it."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from coded import raises_coded
from scripted_server import serving

from lightning_jax.environments import verifiers
from lightning_jax.errors import UserError
from lightning_jax.types import LLM

TOY = """
import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str = ""


class Reverse(vf.Task[Data]):
    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 5)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class Boxed(Reverse):
    NEEDS_CONTAINER = True


class Settings(vf.TasksetConfig):
    size: int = 4


class ToySet(vf.Taskset[Reverse, Settings]):
    def load(self):
        for start in range(self.config.size):
            word = "abcdefghijklmn"[start : start + 3]
            yield Reverse(Data(prompt=f"Reverse {word}", answer=word[::-1]), self.config.task)


__all__ = ["ToySet"]
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the name of an installed task set."""
    pytest.importorskip("verifiers.v1")
    (tmp_path / "toy_reverse.py").write_text(TOY)
    boxed = TOY.replace("Taskset[Reverse,", "Taskset[Boxed,")
    (tmp_path / "toy_boxed.py").write_text(boxed)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    verifiers._tasks.cache_clear()
    yield "toy_reverse"
    for name in ("toy_reverse", "toy_boxed"):
        sys.modules.pop(name, None)


def load(split: str, **options: Any) -> list[dict[str, Any]]:
    return verifiers.load(None, split, Path(), **options)[0]


def test_without_the_package_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    verifiers._tasks.cache_clear()
    with raises_coded(UserError, "not_installed", "verifiers") as caught:
        load("train", taskset="toy_reverse")
    assert "pip install 'verifiers>=0.4'" in str(caught.value)


def test_splits_share_no_task(toy: str) -> None:
    train, dev = (load(split, taskset=toy, config={"size": 10}) for split in ("train", "dev"))
    assert (len(train), len(dev)) == (8, 2)
    assert not {task["id"] for task in train} & {task["id"] for task in dev}
    assert len(load("train", taskset=toy, config={"size": 10}, size=5)) == 4
    assert all(task["question"].startswith("Reverse ") for task in train)


def test_task_sets_that_cannot_run_are_refused(toy: str) -> None:
    with raises_coded(UserError, "not_loaded", "no_such_set"):
        load("train", taskset="no_such_set")
    with raises_coded(UserError, "not_loaded", toy):
        load("train", taskset=toy, config={"sizes": 3})
    with raises_coded(UserError, "too_few", toy):
        load("train", taskset=toy, config={"size": 1})
    with raises_coded(UserError, "unsupported", "toy_boxed"):
        load("train", taskset="toy_boxed")


@pytest.mark.slow  # the package installs the program of its harness with uv
async def test_rewards_are_those_of_the_task_set(toy: str) -> None:
    (task, *_) = load("train", taskset=toy)
    word = task["question"].split()[-1]
    for reply, reward in ((word[::-1], 1.5), ("no", 0.5), ("something else", 0.0)):
        async with serving([reply]) as server:
            llm = LLM(server.base_url, server.api_key, server.model)
            found = await verifiers.run(task, llm)
        assert found["reward"] == reward and found["length"] == len(reply)
        assert server.headers[0]["authorization"] == f"Bearer {server.api_key}"
    async with serving([500] * 9) as server:
        with pytest.raises(ConnectionError):
            await verifiers.run(task, LLM(server.base_url, server.api_key, server.model))
