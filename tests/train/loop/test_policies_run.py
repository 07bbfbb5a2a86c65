"""Test of a run of three policies, one frozen: trained, saved, verified, shown, exported."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coded import raises_coded
from toy_runs import LORA, NAMES, TASKS, TOY, policies_config

from lightning_jax.cli.verify import verify
from lightning_jax.models.config import ModelConfig
from lightning_jax.models.formats.load import load_model, save_hf
from lightning_jax.models.formats.param_names import flatten
from lightning_jax.models.lora import adapted
from lightning_jax.rl.config import AlgorithmConfig
from lightning_jax.rollouts.config import RolloutConfig
from lightning_jax.studio.load import open_run
from lightning_jax.testing.tiny import tiny_model
from lightning_jax.train.config import Config, WarmupConfig
from lightning_jax.train.loop.trainer import train
from lightning_jax.train.memory.lowering import lower_step
from lightning_jax.train.memory.plan import make_plan
from lightning_jax.train.state.checkpoint import CheckpointError
from lightning_jax.train.state.replica import Replica
from lightning_jax.train.state.updaters import phase_updater


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policies") / "tiny"
    save_hf(path, tiny_model(num_layers=1))
    return path


def adapters(config: Config) -> dict[Any, np.ndarray]:
    """Return the trained adapters of the newest checkpoint."""
    loaded = load_model(config.model.name)
    replica = Replica(config, adapted(loaded, LORA, config.seed, len(NAMES)))
    leaves = {path: np.asarray(leaf) for path, leaf in flatten(replica.states[0].params).items()}
    replica.close()
    return leaves


# Adapters, or their own weights.
@pytest.mark.parametrize("rank", [pytest.param(4, marks=pytest.mark.slow), 0])
def test_dpo_teaches_each_policy_by_its_own_calls(
    rank: int, model_dir: Path, tmp_path: Path
) -> None:
    config = policies_config(
        model_dir,
        tmp_path / "run",
        num_steps=1,
        model=ModelConfig(name=str(model_dir), lora=dataclasses.replace(LORA, rank=rank)),
        algorithm=AlgorithmConfig(loss="dpo"),
        rollout=RolloutConfig(tasks_per_step=4, group_size=8),
    )
    (row,) = asyncio.run(train(config, TASKS, []))
    for name in NAMES[:2]:
        assert row[f"train/num_pairs/policy={name}"] > 0.0
    # The mean over a policy's pairs is ln 2 while the policy equals its reference.
    losses = [row["train/loss"] / 2] if rank else [row[f"train/loss/policy={n}"] for n in NAMES[:2]]
    assert losses == pytest.approx([np.log(2.0)] * len(losses), abs=1e-5)


def test_two_policies_learn_and_the_frozen_one_stays(model_dir: Path, tmp_path: Path) -> None:
    config = policies_config(model_dir, tmp_path / "run")
    rows = asyncio.run(train(config, TASKS, []))
    assert max(row.get("train/mismatch_kl", 0.0) for row in rows) < 1e-5
    for name in NAMES:
        assert rows[0][f"rollout/calls_mean/policy={name}"] == 1.0
    assert rows[0]["rollout/dropped_frozen_calls"] == 8.0
    assert rows[0]["train/grad_norm/policy=speaker"] > 0.0
    assert rows[0]["train/grad_norm/policy=judge"] == 0.0
    assert rows[0]["train/num_groups/policy=listener"] == 2.0
    before = flatten(adapted(load_model(str(model_dir)), LORA, config.seed, 3).params)
    after = adapters(config)
    for path, leaf in after.items():
        moved = [np.abs(leaf[index] - before[path][index]).max() for index in range(3)]
        assert min(moved[:2]) > 1e-4 and moved[2] == 0.0

    report = verify(tmp_path / "run")
    assert [each.weights for each in report.versions] == [str(model_dir), "checkpoints/1"]
    assert report.off == [] and sum(len(each.comparisons) for each in report.versions) > 40
    with open_run(tmp_path / "run") as reader:
        calls = reader.rollout("train-00001-000-00-1").calls
    assert [call.answered_by for call in calls] == list(NAMES)
    assert [call.credit is not None for call in calls] == [True, True, False]
    policies = [load_model(str(tmp_path / "run" / "policy" / name)) for name in NAMES]
    base = flatten(load_model(str(model_dir)).params)
    for index, model in enumerate(policies):
        kernel, layer = ("layers_0", "q", "kernel"), ("layers_0", "q")
        change = LORA.scale * after[(*layer, "lora_a")][index] @ after[(*layer, "lora_b")][index]
        found = flatten(model.params)[kernel] - base[kernel]
        np.testing.assert_allclose(found, change, atol=1e-6)
        file = tmp_path / "run" / "policy_adapter" / NAMES[index] / "adapter_model.safetensors"
        assert file.is_file()

    others = dict(reversed(config.policies.items()))
    loaded = adapted(load_model(str(model_dir)), LORA, config.seed, len(NAMES))
    with raises_coded(CheckpointError, "mismatch", "policies"):
        Replica(dataclasses.replace(config, policies=others), loaded)


@pytest.mark.slow
def test_a_joint_run_with_a_critic_and_a_warm_up(model_dir: Path, tmp_path: Path) -> None:
    config = policies_config(
        model_dir,
        tmp_path / "run",
        num_steps=1,
        algorithm=AlgorithmConfig(
            policy_updates="joint", value_heads="shared", credit="learned", kl_coef=0.1
        ),
        warmup=WarmupConfig(num_steps=1, demonstrations=f"{TOY}:demonstrate", groups_per_step=1),
    )
    shown, row = asyncio.run(train(config, TASKS, []))
    # Demonstrations name no policy, so all three learn them, including the frozen one.
    assert min(shown[f"warmup/grad_norm/policy={name}"] for name in NAMES) > 0.0
    assert row["train/kl_to_reference"] < 1e-6 and row["train/value_loss"] > 0.0
    assert "train/num_groups" in row and "train/num_groups/policy=judge" not in row
    assert row["train/grad_norm/policy=judge"] == 0.0


def test_a_plan_has_room_for_all_adapters(model_dir: Path, tmp_path: Path) -> None:
    config = policies_config(model_dir, tmp_path)
    model = adapted(load_model(str(model_dir)), LORA, 0, len(NAMES)).config
    one = make_plan(model.with_execution(num_adapters=None), config)
    three = make_plan(model, config)
    sizes = [
        {item.name: item.num_bytes for item in each.items}["optimizer moments"]
        for each in (one, three)
    ]
    assert sizes[1] == 3 * sizes[0]
    for lowered in lower_step(
        phase_updater(model, config, supervised=False), config.model.dtype, config.distill
    ):
        assert "func" in lowered.as_text()
