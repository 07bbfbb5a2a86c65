"""Tests of a run with a teacher: it learns where all rewards are equal."""

import asyncio
import dataclasses
from pathlib import Path

import jax
import pytest
import toy_agent
from coded import raises_coded
from random_adapters import export_small_adapters
from toy_runs import TASKS, toy_config

from lightning_jax.models.config import MeshConfig, ModelConfig
from lightning_jax.models.formats.load import LoadedModel, load_model, save_hf
from lightning_jax.models.mesh import make_mesh
from lightning_jax.models.model_files import ModelError
from lightning_jax.models.policies import Policy
from lightning_jax.rl.config import AlgorithmConfig, BatchConfig, DistillConfig
from lightning_jax.rl.distill import Scores, make_scorer
from lightning_jax.rl.sequence import TrainingSequence
from lightning_jax.settings import ConfigError, load_config
from lightning_jax.testing.tiny import tiny_model
from lightning_jax.train.config import Config
from lightning_jax.train.loop.trainer import train
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


@pytest.mark.parametrize("is_initial", [False, True])
def test_an_exported_policy_teaches_as_its_run_served_it(tmp_path: Path, is_initial: bool):
    """With weights in bfloat16. As the initial model of a run, it has its adapters merged."""
    served = export_small_adapters(tmp_path, MODEL)
    settings = ModelConfig(str(tmp_path / "policy"), "bfloat16", "float32")
    initial = load_model(settings.name, settings.dtype)
    batch = BatchConfig(rows=1, row_len=64, max_targets=16, head_chunk=16)
    mesh = make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])
    sequences = [TrainingSequence((5, 6, 7), (8, 9, 10), (-1.0,) * 3, 1.0, 1.0)]

    def logprobs_of(scores: Scores) -> list[tuple[float, ...]]:
        return [response.logprobs for response in scores if response is not None]

    def scores_of(model: LoadedModel) -> Scores:
        config = model.config.with_execution(activation_dtype="float32")
        return make_scorer(config, batch, mesh=mesh, dtype="bfloat16")(model.params, sequences)

    as_read, as_served = (logprobs_of(scores_of(model)) for model in (initial, served))

    policy = Policy() if is_initial else Policy(base=settings.name)
    teacher = load_teacher(initial, policy, DistillConfig(), settings, batch, mesh)
    assert teacher is not None
    assert logprobs_of(teacher.score(sequences)) == (as_read if is_initial else as_served)
    assert len(as_read) == 1 and as_read != as_served


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
