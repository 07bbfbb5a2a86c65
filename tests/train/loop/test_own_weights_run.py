"""Test of a run of three policies with their own weights: trained, saved, resumed, exported."""

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coded import raises_coded
from toy_runs import TASKS, TOY, toy_config

from lightning_jax.cli.verify import as_text, verify
from lightning_jax.engine.config import ServeConfig
from lightning_jax.models.config import PolicyConfig
from lightning_jax.models.formats.load import load_model, save_hf
from lightning_jax.models.formats.param_names import flatten
from lightning_jax.rl.config import AlgorithmConfig, OptimizerConfig
from lightning_jax.rollouts.config import AgentConfig, RolloutConfig
from lightning_jax.studio.load import open_run
from lightning_jax.testing.tiny import tiny_model
from lightning_jax.traces.config import RoleConfig
from lightning_jax.train.config import CheckpointConfig, Config, EvalConfig, WarmupConfig
from lightning_jax.train.loop.run import Run
from lightning_jax.train.loop.trainer import train
from lightning_jax.train.state.checkpoint import CheckpointError
from lightning_jax.train.state.replica import Replica

NAMES = ("speaker", "listener", "judge")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save two models of one shape, and return the folder."""
    path = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("tiny", "other")):
        save_hf(path / name, tiny_model(seed, num_layers=1))
    return path


def settings(models: Path, run: Path, **changes: Any) -> Config:
    return toy_config(
        models / "tiny",
        run,
        **{
            "num_steps": 2,
            "policies": {
                "speaker": PolicyConfig(),
                "listener": PolicyConfig(base=str(models / "other")),
                "judge": PolicyConfig(trains=False),
            },
            "roles": {
                "speaker": RoleConfig(agent="speaker", policy="speaker"),
                "listener": RoleConfig(agent="listener", policy="listener"),
                "judge": RoleConfig(model="judge", policy="judge"),
            },
            "agent": AgentConfig(f"{TOY}:three_policies"),
            "serve": ServeConfig(slots=2, max_len=64, prefill_buckets=(32,)),
            # One at a time, because requests in one batch change the rounding.
            "rollout": RolloutConfig(tasks_per_step=2, group_size=4, concurrency=1),
            "optimizer": OptimizerConfig(learning_rate=3e-2),
            "eval": EvalConfig(every=0, num_tasks=2, at_start=False),
            "checkpoint": CheckpointConfig(every=1, keep=3),
        }
        | changes,
    )


def exported(run: Path, name: str) -> dict[Any, np.ndarray]:
    return flatten(load_model(str(run / "policy" / name)).params)


@pytest.fixture(scope="module")
def trained(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list]]:
    run = tmp_path_factory.mktemp("own") / "run"
    yield run, asyncio.run(train(settings(models, run), TASKS, []))


def test_two_policies_learn_and_the_frozen_one_stays(models: Path, trained: Any) -> None:
    run, rows = trained
    begin = [flatten(load_model(str(models / name)).params) for name in ("tiny", "other", "tiny")]
    for name, before in zip(NAMES, begin, strict=True):
        assert rows[0][f"rollout/calls_mean/policy={name}"] == 1.0
        moved = max(np.abs(leaf - before[path]).max() for path, leaf in exported(run, name).items())
        assert moved == 0.0 if name == "judge" else moved > 1e-3
    # The listener's and speaker's weights were copied. The judge's only got the next version.
    leaves = begin[0].values()
    size = 2 * 4 * sum(leaf.size for leaf in leaves) / 1e9
    published = rows[0]["serve/publish_gb_per_s"] * rows[0]["time/publish_s"]
    assert published == pytest.approx(size)
    # Each policy is trained on its own samples, with the weights that sampled them.
    assert max(row.get("train/mismatch_kl", 0.0) for row in rows) < 1e-5
    assert rows[0]["rollout/dropped_frozen_calls"] == 8.0
    assert rows[0]["train/num_updates"] == 2.0
    assert rows[0]["train/grad_norm/policy=speaker"] != rows[0]["train/grad_norm/policy=listener"]
    assert "train/grad_norm/policy=judge" not in rows[0]
    assert rows[0]["train/num_groups/policy=listener"] == 2.0


def test_the_record_fits_the_weights_of_each_policy(models: Path, trained: Any) -> None:
    run, _ = trained
    report = verify(run)
    assert report.off == [] and report.not_compared == {}
    assert [version.weights for version in report.versions] == [
        f"judge: {models / 'tiny'}",
        f"listener: {models / 'other'}",
        f"speaker: {models / 'tiny'}",
        *(f"{name}: checkpoints/1" for name in ("judge", "listener", "speaker")),
    ]
    assert as_text(report).endswith("all 48 calls are within 0.001 nats")
    with open_run(run) as reader:
        calls = reader.rollout("train-00001-000-00-1").calls
    assert [call.answered_by for call in calls] == list(NAMES)
    assert [call.credit is not None for call in calls] == [True, True, False]


def test_after_a_break_each_policy_is_served_by_its_own_weights(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(models, tmp_path / "run")
    policy_sequences = Run._policy_sequences

    async def breaks(run: Run) -> Any:
        if run.step == 1:
            await run.saved()
            raise RuntimeError("the machine is gone")
        return await policy_sequences(run)

    monkeypatch.setattr(Run, "_policy_sequences", breaks)
    with pytest.raises(RuntimeError, match="the machine is gone"):
        asyncio.run(train(config, TASKS, []))
    monkeypatch.undo()
    _, row = asyncio.run(train(config, TASKS, []))
    assert row["train/mismatch_kl"] < 1e-5  # all its rollouts are from after the crash
    assert not verify(tmp_path / "run").off  # including the frozen policy


def test_after_a_break_it_ends_with_the_same_weights(
    models: Path, trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(models, tmp_path / "run", checkpoint=CheckpointConfig(every=1, keep=1))
    learn = Run._learn

    async def breaks(run: Run, sequences: Any) -> Any:
        if run.step == 1:
            await run.saved()
            raise RuntimeError("the machine is gone")
        return await learn(run, sequences)

    monkeypatch.setattr(Run, "_learn", breaks)
    with pytest.raises(RuntimeError, match="the machine is gone"):
        asyncio.run(train(config, TASKS, []))
    monkeypatch.undo()
    asyncio.run(train(config, TASKS, []))
    for name in NAMES:
        whole = exported(trained[0], name)
        for path, leaf in exported(tmp_path / "run", name).items():
            np.testing.assert_allclose(leaf, whole[path], atol=1e-6)
    others = config.policies | {"judge": PolicyConfig()}
    with raises_coded(CheckpointError, "mismatch", "policies"):
        Replica(dataclasses.replace(config, policies=others), load_model(config.model.name))


@pytest.mark.slow
def test_a_joint_run_with_critics_and_a_warm_up(models: Path, tmp_path: Path) -> None:
    config = settings(
        models,
        tmp_path / "run",
        num_steps=1,
        algorithm=AlgorithmConfig(policy_updates="joint", credit="learned", kl_coef=0.1),
        warmup=WarmupConfig(num_steps=1, demonstrations=f"{TOY}:demonstrate", groups_per_step=1),
    )
    shown, row, final = asyncio.run(train(config, TASKS, TASKS))
    # Demonstrations name no policy, so all three learn them, including the frozen one.
    assert min(shown[f"warmup/grad_norm/policy={name}"] for name in NAMES) > 0.0
    assert row["train/kl_to_reference"] < 1e-6 and row["train/value_loss"] > 0.0
    assert "train/num_groups" in row and "train/num_groups/policy=speaker" not in row
    assert "eval/reward_mean" in final
    assert verify(tmp_path / "run").off == []
