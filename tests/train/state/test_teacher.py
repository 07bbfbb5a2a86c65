"""Tests of a run with a teacher: it learns where all rewards are equal."""

import asyncio
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import toy_agent
from coded import raises_coded
from toy_runs import TASKS, toy_config

from lightning_jax.models.config import LoraConfig, MeshConfig, ModelConfig
from lightning_jax.models.formats.load import load_model, save_hf
from lightning_jax.models.formats.param_names import flatten, unflatten
from lightning_jax.models.lora import ADAPTER_LEAVES, adapted
from lightning_jax.models.mesh import make_mesh
from lightning_jax.models.model_files import ModelError
from lightning_jax.models.policies import Policy
from lightning_jax.rl.config import AlgorithmConfig, BatchConfig, DistillConfig
from lightning_jax.rl.distill import make_scorer
from lightning_jax.rl.sequence import TrainingSequence
from lightning_jax.settings import ConfigError, load_config
from lightning_jax.testing.tiny import tiny_model
from lightning_jax.train.config import Config
from lightning_jax.train.loop.trainer import train
from lightning_jax.train.state.export import export
from lightning_jax.train.state.teacher import check_vocabulary, load_teacher

MODEL = tiny_model(num_layers=1)


def test_a_run_learns_from_its_teacher_where_all_rewards_are_equal(tmp_path: Path):
    model_dir, teacher_dir = tmp_path / "model", tmp_path / "teacher"
    save_hf(model_dir, MODEL)
    save_hf(teacher_dir, tiny_model(seed=1, num_layers=1, embed_dim=48))
    distill = DistillConfig(teacher=str(teacher_dir), coef=1.0, final_coef=0.0, anneal_steps=1)
    config = toy_config(model_dir, tmp_path / "run", num_steps=2, distill=distill)
    rows = asyncio.run(train(config, TASKS, TASKS, agent=toy_agent.unrewarded))
    first, second = rows[0], rows[1]
    assert first["train/equal_groups_share"] == second["train/equal_groups_share"] == 1.0
    assert first["train/num_updates"] == 1.0 and first["train/grad_norm"] > 0.0
    assert first["train/teacher_coef"] == first["train/teacher_share"] == 1.0
    assert first["train/without_teacher"] == 0.0 and "train/kl_to_teacher" in first
    assert first["train/distill_kl"] > 0.0 and 0.2 < first["train/teacher_named_mass"] <= 1.0
    # At weight 0 the teacher does not run, and nothing is learned.
    assert second["train/teacher_coef"] == second["train/num_updates"] == 0.0
    assert "train/kl_to_teacher" not in second and "train/distill_kl" not in second
    assert load_model(str(tmp_path / "run" / "policy")).config == MODEL.config


def test_a_policy_that_a_run_exported_teaches_as_that_run_served_it(tmp_path: Path):
    """Weights in bfloat16 are not those with the adapters merged, which rounding would take."""
    model = adapted(MODEL, LoraConfig(rank=2, alpha=2.0))
    weights = {
        path: 1e-3 * jnp.ones_like(leaf) if path[-1] == "lora_b" else leaf
        for path, leaf in flatten(model.params).items()
    }
    served = unflatten(
        {
            path: leaf if path[-1] in ADAPTER_LEAVES else leaf.astype(jnp.bfloat16)
            for path, leaf in weights.items()
        }
    )
    export(tmp_path, model, "", served, {})
    settings = ModelConfig(str(tmp_path / "policy"), "bfloat16", "float32")
    batch = BatchConfig(rows=1, row_len=64, max_targets=16, head_chunk=16)
    mesh, policy = make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1]), Policy(base=settings.name)
    sequences = [TrainingSequence((5, 6, 7), (8, 9, 10), (-1.0,) * 3, 1.0, 1.0)]
    teacher = load_teacher(MODEL, policy, DistillConfig(), settings, batch, mesh)
    assert teacher is not None
    (scores,) = teacher.score(sequences)
    config = model.config.with_execution(activation_dtype="float32")
    (expected,) = make_scorer(config, batch, mesh=mesh, dtype="bfloat16")(served, sequences)
    assert scores is not None and expected is not None
    assert scores.logprobs == expected.logprobs


def test_tokens_that_a_teacher_names():
    """All that a model in this process can, as many as servers allow, or none."""
    url = ["distill.teacher_url=http://localhost:1/v1", "distill.served_model=m"]
    for settings, number in (
        (["distill.teacher=tiny"], 64),
        (["distill.teacher=tiny", "distill.top_k=5", "distill.kl=reverse"], 5),
        (["distill.teacher=tiny", "distill.kl=sampled"], 0),
        (url, 20),
        ([*url, "distill.top_k=5"], 5),
    ):
        assert load_config(Config, settings).distill.num_top == number


def test_a_teacher_with_another_vocabulary_is_refused():
    check_vocabulary(tiny_model(seed=1, embed_dim=48), MODEL)
    smaller = MODEL.config.with_shape(vocab_size=MODEL.config.shape.vocab_size - 1)
    with raises_coded(ModelError, "mismatch", "distill.teacher"):
        check_vocabulary(dataclasses.replace(MODEL, config=smaller), MODEL)


@pytest.mark.parametrize("loss", ["dpo", "raft"])
def test_losses_with_advantages_of_their_own_take_no_teacher(loss: str):
    with raises_coded(ConfigError, "conflict", "distill.teacher"):
        load_config(Config, [f"algorithm.loss={loss}", "distill.teacher=tiny"])
    Config(algorithm=AlgorithmConfig(loss=loss))


@pytest.mark.parametrize("changes", [["final_coef=0"], ["anneal_steps=3"]])
def test_annealing_needs_both_of_its_settings(changes: list[str]):
    with raises_coded(ConfigError, "conflict", "distill.anneal_steps"):
        load_config(Config, ["distill.teacher=tiny", *(f"distill.{text}" for text in changes)])
