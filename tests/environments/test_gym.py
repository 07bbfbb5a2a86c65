"""Tests of reasoning-gym's tasks: with a package like it, and with the package where installed."""

import dataclasses
import json
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from coded import raises_coded

from lightning_jax.cli.main import main
from lightning_jax.environments import gym
from lightning_jax.errors import UserError
from lightning_jax.settings import load_config
from lightning_jax.train.config import Config


@dataclasses.dataclass
class SumConfig:
    seed: int
    size: int
    digits: int = 1
    failure_rate: float = 0.0


class Sums:
    """Family of sums. An entry is a function of the seed plus its index, as in the package."""

    def __init__(self, config: SumConfig) -> None:
        if config.digits > 2:
            raise AssertionError("digits must be <= 2")
        self.config = config

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = random.Random(self.config.seed + index)
        if rng.random() < self.config.failure_rate:
            raise ValueError("found no puzzle")
        a, b = (rng.randrange(10**self.config.digits) for _ in "ab")
        return {"question": f"{a} + {b}", "answer": str(a + b), "metadata": {"terms": (a, b)}}

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        assert isinstance(entry["metadata"]["terms"], tuple)  # JSON would make it a list
        return float(answer == entry["answer"])


class Curriculum:
    def __init__(self) -> None:
        self.attributes = {"digits": dataclasses.make_dataclass("Levels", ["levels"])([1, 2, 3])}

    def set_global_level(self, level: int) -> None:
        self.level = level

    def generate_configuration(self, given: dict[str, int], context: Any) -> SumConfig:
        assert context.mode == "upper"  # only this level, not those below
        levels, rates = self.attributes["digits"].levels, [0.0, 0.5, 0.0]
        return SumConfig(**given, digits=levels[self.level], failure_rate=rates[self.level])


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package with the names that we use of reasoning-gym, and two families."""
    factory = ModuleType("reasoning_gym.factory")
    vars(factory).update(
        DATASETS={"sums": (Sums, SumConfig), "flat": (Sums, SumConfig), "composite": None},
        has_curriculum=lambda name: name == "sums",
        create_curriculum=lambda name: Curriculum(),
    )
    curricula = ModuleType("reasoning_gym.coaching.base_curriculum")
    mode = dataclasses.make_dataclass("Mode", ["UPPER_BOUND"])("upper")
    vars(curricula).update(
        RangeAttributeMode=mode,
        DefaultCurriculumContext=dataclasses.make_dataclass("Context", ["mode"]),
    )
    for module in (ModuleType("reasoning_gym"), factory, curricula):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    gym._dataset.cache_clear()


def load(split: str, **options: Any) -> tuple[list[dict[str, Any]], dict[str, int]]:
    return gym.load(None, split, Path(), **{"family": "sums", "levels": [0, 1], **options})


@pytest.mark.usefixtures("package")
def test_tasks_of_the_splits_differ_and_carry_their_level() -> None:
    train, left_out = load("train", size=80, dev_size=15)
    dev, _ = load("dev", size=80, dev_size=15)
    questions = {task["question"] for task in train}
    assert not questions & {task["question"] for task in dev}
    assert len(questions) == len(train) == 160 - sum(left_out.values())
    assert 20 < left_out["not_generated"] < 60  # half of level 1
    assert left_out["in_dev"] > 0  # of the 100 sums of single digits
    assert {task["level"] for task in train} == {task["level"] for task in dev} == {0, 1}
    ids = [task["id"] for task in (*train, *dev)]
    assert len(ids) == len({*ids})
    assert load("train", size=80, dev_size=15)[0] == train
    assert load("train", size=80, dev_size=15, seed=1)[0] != train


@pytest.mark.usefixtures("package")
def test_score_is_that_of_the_verifier_for_the_task_that_it_made() -> None:
    task = json.loads(json.dumps(load("train", size=9)[0][-1]))
    assert gym.score(task, f" {task['answer']}\n") == 1.0
    assert gym.score(task, "no") == 0.0
    with raises_coded(UserError, "changed", task["id"]):
        gym.score(task | {"question": "another"}, task["answer"])


@pytest.mark.usefixtures("package")
def test_levels_and_families_are_checked() -> None:
    assert gym.families() == ["flat", "sums"]
    assert gym.num_levels("sums") == 3 and gym.num_levels("flat") == 1
    assert list(gym.first_tasks("sums")) == [0, 1]  # the family refuses level 2 itself
    with raises_coded(UserError, "unusable", "data.options.levels"):
        load("train", levels=[2])
    for levels in ([3], [-1]):
        with raises_coded(UserError, "out_of_range", "data.options.levels"):
            load("train", levels=levels)
    with raises_coded(UserError, "out_of_range", "data.options.size"):
        load("train", size=0)
    with raises_coded(UserError, "unknown", "sum"):
        load("train", family="sum")


@pytest.mark.usefixtures("package")
def test_new_writes_the_family_and_its_levels_and_names_close_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", str(tmp_path / "mine"), "--env", "gym:sums"]) == 0
    text = (tmp_path / "mine/config.yaml").read_text()
    assert "family: sums\n" in text and "levels: [0, 1]  #" in text
    capsys.readouterr()
    assert main(["new", str(tmp_path / "other"), "--env", "gym:sumz"]) == 1
    assert "did you mean sums?" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


@pytest.mark.usefixtures("package")
def test_limits_of_the_template_follow_from_the_first_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def entry(self: Sums, index: int) -> dict[str, Any]:
        return {"question": "9" * 2000, "answer": "8" * 100}

    monkeypatch.setattr(Sums, "__getitem__", entry)
    assert main(["new", str(tmp_path / "mine"), "--env", "gym:flat"]) == 0
    config = load_config(Config, [str(tmp_path / "mine/config.yaml")])
    assert (config.rollout.max_tokens or 0) >= 75 and config.serve.max_len >= 1500 + 75
    assert config.serve.slots * config.serve.max_len <= 16 * 1024


@pytest.mark.usefixtures("package")
def test_envs_lists_the_families(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["envs", "gym"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["gym:flat", "gym:sums"]


def test_without_the_package_new_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    assert main(["new", str(tmp_path / "mine"), "--env", "gym:chain_sum"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("is not installed; run pip install reasoning-gym.")
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize("family", ["chain_sum", "spell_backward", "gsm_symbolic", "countdown"])
def test_the_package_scores_its_answers_and_no_others(family: str) -> None:
    pytest.importorskip("reasoning_gym")
    gym._dataset.cache_clear()
    levels = list(gym.first_tasks(family))
    assert levels[:1] == [0]
    train, _ = gym.load(None, "train", Path(), family=family, levels=levels[:2], size=6, dev_size=2)
    dev, _ = gym.load(None, "dev", Path(), family=family, levels=levels[:2], size=6, dev_size=2)
    assert not {t["question"] for t in train} & {t["question"] for t in dev}
    for task in json.loads(json.dumps([*train, *dev])):
        assert gym.score(task, "?") < 1.0  # some give part of it
        if family != "countdown":  # whose answer is one of many
            assert gym.score(task, task["answer"]) == 1.0
    assert {"chain_sum", "spell_backward", "gsm_symbolic"} <= {*gym.families()}
    assert gym.num_levels("chain_sum") > 5 and gym.num_levels("gsm_symbolic") == 1
