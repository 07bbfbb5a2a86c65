"""Test of a run that trains adapters: it learns, verifies, and exports both forms of the policy."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy
from toy_runs import TASKS, toy_config

from lightning_jax.cli.verify import verify
from lightning_jax.models.config import LoraConfig, ModelConfig
from lightning_jax.models.formats.load import load_model, save_hf
from lightning_jax.models.formats.param_names import flatten
from lightning_jax.models.lora import adapted, trained_part
from lightning_jax.models.transformer import init_params
from lightning_jax.rl.config import OptimizerConfig
from lightning_jax.rollouts.config import RolloutConfig
from lightning_jax.testing.tiny import tiny_model
from lightning_jax.train.config import Config
from lightning_jax.train.loop.trainer import train

LORA = LoraConfig(rank=8, alpha=16.0)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model whose frozen head can produce any logits.

    With the tied embedding, logits would stay small for any adapters.
    """
    directory = tmp_path_factory.mktemp("lora") / "tiny"
    model = tiny_model(num_layers=1)
    config = model.config.with_shape(tie_embeddings=False)
    params = init_params(config, jax.random.key(0))
    params["head"]["kernel"] = 20.0 * params["head"]["kernel"]
    save_hf(directory, dataclasses.replace(model, config=config, params=params))
    return directory


def settings(model_dir: Path, run: Path, **changes: Any) -> Config:
    return toy_config(
        model_dir,
        run,
        model=ModelConfig(name=str(model_dir), lora=LORA),
        optimizer=OptimizerConfig(learning_rate=3e-2),
        **changes,
    )


@pytest.mark.slow
def test_a_toy_task_is_learned_by_adapters_alone(model_dir: Path, tmp_path: Path) -> None:
    config = settings(model_dir, tmp_path / "run", num_steps=9)
    rows = asyncio.run(train(config, TASKS, TASKS))
    rewards = [row["rollout/reward_mean"] for row in rows if "rollout/reward_mean" in row]
    assert rewards[0] < 0.5 and rewards[-1] > 0.9
    assert max(row.get("train/mismatch_kl", 0.0) for row in rows) < 1e-5


def test_adapters_are_served_saved_verified_and_exported(model_dir: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    rollout = RolloutConfig(tasks_per_step=2, group_size=4, temperature=0.8)
    config = settings(model_dir, run, num_steps=3, rollout=rollout)
    rows = asyncio.run(train(config, TASKS, TASKS))
    # The engine decodes with the published adapters, so its log-probabilities equal the
    # trainer's at the same temperature.
    assert max(row.get("train/mismatch_kl", 0.0) for row in rows) < 1e-5
    base = load_model(str(model_dir))
    adapters = trained_part(adapted(base, LORA, 0).params)
    numbers = sum(leaf.size for leaf in jax.tree.leaves(adapters))
    sent = 4 * numbers / rows[0]["time/publish_s"] / 1e9  # adapters only
    assert rows[0]["serve/publish_gb_per_s"] == pytest.approx(sent)

    report = verify(run)
    assert [v.weights for v in report.versions] == [str(model_dir), "checkpoints/3"]
    assert report.off == []
    (run / "checkpoints").rename(run / "gone")
    report = verify(run)
    assert [v.weights for v in report.versions] == [str(model_dir), "policy"]
    assert report.off == []

    before, after = flatten(base.params), flatten(load_model(str(run / "policy")).params)
    assert before.keys() == after.keys()
    tensors = safetensors.numpy.load_file(run / "policy_adapter" / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    change = 2.0 * (tensors[name.format("B")] @ tensors[name.format("A")]).T
    kernel = ("layers_0", "q", "kernel")
    assert np.abs(change).max() > 1e-3
    np.testing.assert_allclose(after[kernel] - before[kernel], change, atol=1e-5)
    for path in (("embed", "embedding"), ("layers_0", "attn_norm", "scale")):
        np.testing.assert_array_equal(after[path], before[path])
