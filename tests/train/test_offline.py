"""Tests of policy steps on the stored rollouts of a run, with other rewards."""

import asyncio
import dataclasses
import json
import shutil
from collections import Counter
from contextlib import closing
from pathlib import Path

import jax
import numpy as np
import pytest
from coded import raises_coded
from test_groups import TASKS, _config
from test_sft import settings

from lightning_jax.cli.from_stored import settings_of_offline_run
from lightning_jax.cli.main import main
from lightning_jax.models.formats.load import load_model
from lightning_jax.settings import ConfigError, load_config, save_config
from lightning_jax.traces.store import Store
from lightning_jax.train import trainer
from lightning_jax.train.config import Config
from lightning_jax.train.metrics import read_metrics
from lightning_jax.train.offline import learn_from_rewards
from lightning_jax.types import Rollout

COMPONENTS = """
def same(task, attempt):
    return attempt.reward


def short(task, attempts):
    return [-float(len(attempt.response)) for attempt in attempts]


def equal(task, attempts):
    return [1.0] * len(attempts)


def broken(task, attempt):
    raise ValueError("no")
"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("offline") / "run"
    config = dataclasses.replace(_config(path), num_steps=1)
    asyncio.run(trainer.train(config, TASKS, TASKS))
    return path


def rewards_file(folder: Path, component: str, kind: str = "function") -> str:
    (folder / "rewards.py").write_text(COMPONENTS)
    file = folder / "rewards.yaml"
    file.write_text(f"rewards: {{{component}: {{{kind}: rewards.py:{component}}}}}\n")
    return str(file)


def stored(run_dir: Path) -> dict[str, Rollout]:
    with closing(Store(run_dir / "store.sqlite", read_only=True)) as store:
        return {rollout.rollout_id: rollout for rollout in store.rollouts(phase="train")}


def test_the_same_rewards_make_the_step_that_the_run_made(run_dir: Path, tmp_path: Path):
    out = tmp_path / "out"
    flags = ["--rewards", rewards_file(tmp_path, "same"), "--train", f"run_dir={out}"]
    assert main(["rescore", str(run_dir), *flags]) == 0
    (row,) = read_metrics(out / "metrics.jsonl")
    first = read_metrics(run_dir / "metrics.jsonl")[0]
    for name in ("train/loss", "train/grad_norm", "rollout/reward_mean", "train/num_groups"):
        assert row[name] == pytest.approx(first[name], rel=1e-4, abs=1e-6)
    begun = load_model("tiny").params
    learned, of_run = (load_model(str(path / "policy")).params for path in (out, run_dir))
    change, rest = (
        max(
            np.abs(np.asarray(a) - np.asarray(b)).max()
            for a, b in zip(jax.tree.leaves(learned), jax.tree.leaves(other), strict=True)
        )
        for other in (begun, of_run)
    )
    assert change > 1e-3 and rest < 0.01 * change


OBSERVER = '''
"""Agent that fails now and then, and a baseline that records all that advantages are made of."""

import json
from pathlib import Path

import toy_agent


async def run(task, llm):
    if "-02-1" in llm.base_url:
        raise KeyError("before any call")
    reward = await toy_agent.run(task, llm)
    if reward == 0:
        raise ValueError("after a call")
    return reward - 2.0


def recorded(returns, group_ids):
    line = json.dumps([returns.tolist(), list(group_ids)])
    with Path(__file__).with_name("seen.jsonl").open("a") as file:
        file.write(line + "\\n")
    return returns * 0 + returns.mean()
'''
OF_ADVANTAGES = (
    "train/advantage_abs_mean",
    "train/num_groups",
    "train/equal_groups_share",
    "train/failures_gain_share",
    "rollout/reward_mean",
)


@pytest.mark.parametrize(
    "changes",
    [{}, {"ahead": 3}],
    ids=["lock_step", "ahead"],
)
def test_unchanged_rewards_give_the_advantages_of_the_run_failures_included(
    tmp_path: Path, changes: dict[str, int]
):
    agent = tmp_path / "agent.py"
    agent.write_text(OBSERVER)
    seen, out = tmp_path / "seen.jsonl", tmp_path / "out"
    made = _config(tmp_path / "run")
    config = dataclasses.replace(
        made,
        num_steps=4,
        agent=dataclasses.replace(made.agent, function=f"{agent}:run"),
        rollout=dataclasses.replace(made.rollout, max_agent_failures=1.0, **changes),
        algorithm=dataclasses.replace(
            made.algorithm, baseline=f"{agent}:recorded", normalize="batch_std"
        ),
    )
    asyncio.run(trainer.train(config, TASKS, TASKS))
    of_run = seen.read_text()
    seen.unlink()
    by_status = Counter(rollout.status for rollout in stored(tmp_path / "run").values())
    assert by_status["scored"] > 2 and by_status["agent_failure"] > 4
    flags = ["--rewards", rewards_file(tmp_path, "same"), "--train", f"run_dir={out}"]
    assert main(["rescore", str(tmp_path / "run"), *flags]) == 0
    assert seen.read_text() == of_run and len(of_run.splitlines()) >= 8
    assert min(map(min, (json.loads(line)[0] for line in of_run.splitlines()))) < -1
    before = read_metrics(tmp_path / "run/metrics.jsonl")
    after = read_metrics(out / "metrics.jsonl")
    assert len(after) == 4
    for first, second in zip(before, after, strict=False):
        assert all(first[name] == second[name] for name in OF_ADVANTAGES)


@pytest.mark.parametrize(
    ("of_run", "given", "expected"),
    [
        ([], [], ("old", "truncate")),
        (["correction=mask"], [], ("old", "mask")),
        ([], ["proximal=behavior"], ("behavior", "none")),
        ([], ["correction=none"], ("old", "none")),
        (["loss=reinforce"], [], ("old", "truncate")),
        (["loss=dpo"], [], ("behavior", "none")),
        ([], ["loss=dpo"], ("behavior", "none")),
    ],
    ids=str,
)
def test_stored_samples_are_compared_with_the_old_policy_by_default(
    tmp_path: Path, of_run: list[str], given: list[str], expected: tuple[str, str]
):
    source = tmp_path / "run"
    source.mkdir()
    first = load_config(Config, [f"algorithm.{setting}" for setting in of_run])
    save_config(first, source / "config.yaml")
    named = [f"algorithm.{setting}" for setting in given]
    algorithm = settings_of_offline_run(source, "-other", named).algorithm
    assert (algorithm.proximal, algorithm.correction) == expected


def test_a_step_takes_as_many_groups_as_asked_for(run_dir: Path, tmp_path: Path):
    rollouts = stored(run_dir)
    first = min(rollout.group_id for rollout in rollouts.values())
    some = {key: rollout for key, rollout in rollouts.items() if rollout.group_id == first}
    rows = learn_from_rewards(run_dir, settings(run_dir, tmp_path / "some"), some)
    assert [row["rollout/num_rollouts"] for row in rows] == [3.0]


def test_other_rewards_move_the_policy_the_other_way(run_dir: Path, tmp_path: Path):
    rollouts = stored(run_dir)
    losses = {}
    for sign in (1.0, -1.0):
        rescored = {
            key: dataclasses.replace(rollout, reward=sign * rollout.index)
            for key, rollout in rollouts.items()
        }
        out = tmp_path / f"out{sign}"
        config = settings(run_dir, out, "optimizer.max_grad_norm=1e9")
        learn_from_rewards(run_dir, config, rescored)
        losses[sign] = load_model(str(out / "policy")).params["embed"]["embedding"]
    begun = load_model("tiny").params["embed"]["embedding"]
    up, down = (np.asarray(losses[sign] - begun).ravel() for sign in (1.0, -1.0))
    assert np.dot(up, down) < -0.9 * np.linalg.norm(up) * np.linalg.norm(down)


def test_steps_go_through_the_groups_again(run_dir: Path, tmp_path: Path):
    out = tmp_path / "out"
    flags = ["--train", "--steps", "3", "rollout.tasks_per_step=1", f"run_dir={out}"]
    file = rewards_file(tmp_path, "short", "group")
    assert main(["rescore", str(run_dir), "--rewards", file, *flags]) == 0
    rows = read_metrics(out / "metrics.jsonl")
    assert [row["rollout/num_rollouts"] for row in rows] == [3.0, 3.0, 3.0]
    assert rows[0]["rollout/reward_mean"] == rows[2]["rollout/reward_mean"] < 0  # two groups
    assert rows[0]["rollout/reward_mean"] != rows[1]["rollout/reward_mean"]
    config = load_config(Config, [str(out / "config.yaml")])
    assert list(config.rewards) == ["short"] and config.num_steps == 3
    assert stored(out) == {}


def test_it_goes_on_from_the_policy(run_dir: Path, tmp_path: Path):
    out = tmp_path / "out"
    flags = ["--train", "--start", "policy", f"run_dir={out}"]
    file = rewards_file(tmp_path, "same")
    assert main(["rescore", str(run_dir), "--rewards", file, *flags]) == 0
    (row,) = read_metrics(out / "metrics.jsonl")
    first = read_metrics(run_dir / "metrics.jsonl")[0]
    # The sampler's weights are a step older than these.
    assert row["train/mismatch_kl"] > 10 * first["train/mismatch_kl"]


def test_a_run_that_sampled_ahead_is_rescored(run_dir: Path, tmp_path: Path, capsys):
    config = run_dir / "config.yaml"
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    text = config.read_text()
    assert "  ahead: 0\n" in text
    (copy / "config.yaml").write_text(text.replace("  ahead: 0\n", "  ahead: 3\n"))
    assert main(["rescore", str(copy), "--rewards", rewards_file(tmp_path, "same")]) == 0


def test_rewards_that_are_all_equal_train_nothing(run_dir: Path, tmp_path: Path, capsys):
    file = rewards_file(tmp_path, "equal", "group")
    flags = ["--train", f"run_dir={tmp_path / 'out'}"]
    assert main(["rescore", str(run_dir), "--rewards", file, *flags]) == 1
    assert "nothing was trained" in capsys.readouterr().err


def test_bad_input(run_dir: Path, tmp_path: Path, capsys):
    file = rewards_file(tmp_path, "same")
    assert main(["rescore", str(run_dir), "--rewards", file, "num_steps=2"]) == 1
    assert "--train" in capsys.readouterr().err
    broken = rewards_file(tmp_path, "broken")
    out = tmp_path / "out"
    assert main(["rescore", str(run_dir), "--rewards", broken, "--train", f"run_dir={out}"]) == 1
    assert not out.exists()
    rollouts = stored(run_dir)
    with raises_coded(ConfigError, "exists", "run_dir"):
        learn_from_rewards(run_dir, settings(run_dir, tmp_path), rollouts)
    with raises_coded(ConfigError, "empty", "--phase"):
        learn_from_rewards(run_dir, settings(run_dir, out), {})
    with raises_coded(ConfigError, "unsupported", "distill"):
        hinted = settings(run_dir, out, "distill.teacher=initial")
        learn_from_rewards(run_dir, hinted, rollouts)
    named = ("policies.a.base=null", "policies.b.base=null")
    with raises_coded(ConfigError, "unsupported", "policies"):
        learn_from_rewards(run_dir, settings(run_dir, out, *named), rollouts)
    assert not out.exists()
