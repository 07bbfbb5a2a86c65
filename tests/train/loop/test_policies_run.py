"""Tests of runs of one adapter and of three policies, as adapters or with weights of their own."""

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import safetensors.numpy
from coded import raises_coded
from toy_runs import LORA, NAMES, TASKS, TOY, policies_config, toy_config

from lightning_jax.cli.verify import as_text, verify
from lightning_jax.models.config import LoraConfig, ModelConfig, PolicyConfig
from lightning_jax.models.formats.load import load_model, save_hf
from lightning_jax.models.formats.param_names import flatten
from lightning_jax.models.lora import adapted, trained_part
from lightning_jax.models.transformer import init_params
from lightning_jax.rl.config import AlgorithmConfig
from lightning_jax.rollouts.config import RolloutConfig
from lightning_jax.studio.load import open_run
from lightning_jax.testing.tiny import tiny_model
from lightning_jax.train.config import CheckpointConfig, Config, WarmupConfig
from lightning_jax.train.loop.run import Run
from lightning_jax.train.loop.trainer import train
from lightning_jax.train.memory.lowering import lower_step
from lightning_jax.train.memory.plan import make_plan
from lightning_jax.train.state.checkpoint import CheckpointError
from lightning_jax.train.state.replica import Replica
from lightning_jax.train.state.updaters import phase_updater

ALONE = LoraConfig(rank=8, alpha=16.0)
# Requests one at a time, because those in one batch change the rounding.
ROLLOUT = RolloutConfig(tasks_per_step=2, group_size=4, concurrency=1)
KERNEL = ("layers_0", "q", "kernel")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save two models of one shape, and one whose frozen head can produce any logits.

    With the tied embedding, logits would stay small for any adapters.
    """
    path = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("tiny", "other")):
        save_hf(path / name, tiny_model(seed, num_layers=1))
    model = tiny_model(num_layers=1)
    config = model.config.with_shape(tie_embeddings=False)
    params = init_params(config, jax.random.key(0))
    params["head"]["kernel"] = 20.0 * params["head"]["kernel"]
    save_hf(path / "untied", dataclasses.replace(model, config=config, params=params))
    return path


def settings(kind: str, models: Path, run: Path, **changes: Any) -> Config:
    """Return settings of one policy with an adapter, or of three with `adapters` or `weights`."""
    if kind == "adapter":
        model = ModelConfig(name=str(models / "untied"), lora=ALONE)
        return toy_config(models / "untied", run, model=model, **changes)
    config = policies_config(models / "tiny", run, **{"rollout": ROLLOUT} | changes)
    if kind == "adapters":
        return config
    model = ModelConfig(name=str(models / "tiny"))
    listener = {"listener": PolicyConfig(base=str(models / "other"))}
    return dataclasses.replace(config, model=model, policies=config.policies | listener)


class Trained(NamedTuple):
    kind: str
    config: Config
    rows: list[dict[str, float]]

    @property
    def run(self) -> Path:
        return Path(self.config.run_dir)


@pytest.fixture(scope="module", params=["adapter", "adapters", "weights"])
def trained(
    request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trained]:
    kind, run = request.param, tmp_path_factory.mktemp(request.param) / "run"
    changes: dict[str, Any] = {}
    if kind == "adapter":
        changes = {"num_steps": 3, "rollout": dataclasses.replace(ROLLOUT, temperature=0.8)}
    config = settings(kind, models, run, **changes)
    yield Trained(kind, config, asyncio.run(train(config, TASKS, TASKS[: kind == "adapter"])))


def exported(run: Path, name: str = "") -> dict[Any, np.ndarray]:
    return flatten(load_model(str(run / "policy" / name)).params)


def bases(config: Config) -> list[dict[Any, np.ndarray]]:
    """Return the weights that each policy, or the only one, begins as."""
    policies = config.policies.values() or [PolicyConfig()]
    names = [policy.base or config.model.name for policy in policies]
    return [flatten(load_model(name).params) for name in names]


def test_policies_are_served_and_learn_and_the_frozen_one_stays(trained: Trained) -> None:
    kind, config, rows = trained
    # Each policy is trained on its own samples, with the weights that sampled them.
    assert max(row.get("train/mismatch_kl", 0.0) for row in rows) < 1e-5
    begin, names = bases(config), list(config.policies) or [""]
    for name, before in zip(names, begin, strict=True):
        after = exported(trained.run, name)
        assert before.keys() == after.keys()
        moved = max(np.abs(leaf - before[path]).max() for path, leaf in after.items())
        assert moved == 0.0 if name == "judge" else moved > 1e-4
    # Published were the adapters, or the listener's and the speaker's weights. The judge's only
    # got the next version.
    leaves = begin[0].values()
    if lora := config.model.lora.rank and config.model.lora:
        model = adapted(load_model(config.model.name), lora, 0, len(config.policies) or None)
        leaves = jax.tree.leaves(trained_part(model.params))
    size = (1 + (kind == "weights")) * 4 * sum(leaf.size for leaf in leaves) / 1e9
    published = rows[0]["serve/publish_gb_per_s"] * rows[0]["time/publish_s"]
    assert published == pytest.approx(size)
    if kind == "adapter":
        return
    for name in NAMES:
        assert rows[0][f"rollout/calls_mean/policy={name}"] == 1.0
    assert rows[0]["rollout/dropped_frozen_calls"] == 8.0
    assert rows[0]["train/num_updates"] == {"adapters": 1.0, "weights": 2.0}[kind]
    assert rows[0]["train/num_groups/policy=listener"] == 2.0
    norms = [rows[0].get(f"train/grad_norm/policy={name}") for name in NAMES]
    assert norms[0] != norms[1] and norms[0] and norms[1]
    assert norms[2] == {"adapters": 0.0, "weights": None}[kind]


def test_the_record_fits_the_weights_of_each_policy(trained: Trained) -> None:
    kind, config, _ = trained
    report, base = verify(trained.run), config.model.name
    assert report.off == []
    judge, listener, speaker = (f"{name}: " for name in sorted(NAMES))
    labels = {
        "adapter": [base, "checkpoints/3"],
        "adapters": [base, "checkpoints/1"],
        "weights": [
            judge + base,
            f"{listener}{config.policies['listener'].base}" if config.policies else "",
            speaker + base,
            *(f"{name}checkpoints/1" for name in (judge, listener, speaker)),
        ],
    }
    assert [version.weights for version in report.versions] == labels[kind]
    if kind == "adapter":
        (trained.run / "checkpoints").rename(trained.run / "gone")
        report = verify(trained.run)
        assert [version.weights for version in report.versions] == [base, "policy"]
        assert report.off == []
        return
    assert report.not_compared == {}
    assert as_text(report).endswith("all 48 calls are within 0.001 nats")
    with open_run(trained.run) as reader:
        calls = reader.rollout("train-00001-000-00-1").calls
    assert [call.answered_by for call in calls] == list(NAMES)
    assert [call.credit is not None for call in calls] == [True, True, False]


def test_adapters_are_exported_merged_and_alone(trained: Trained) -> None:
    kind, config, _ = trained
    folder, lora = trained.run / "policy_adapter", config.model.lora
    assert folder.exists() == (kind != "weights")
    if kind == "weights":
        return
    for name, before in zip(list(config.policies) or [""], bases(config), strict=True):
        tensors = safetensors.numpy.load_file(folder / name / "adapter_model.safetensors")
        tensor = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
        change = lora.scale * (tensors[tensor.format("B")] @ tensors[tensor.format("A")]).T
        after = exported(trained.run, name)
        assert np.abs(change).max() > 1e-4 or name == "judge"
        np.testing.assert_allclose(after[KERNEL] - before[KERNEL], change, atol=1e-5)
        for path in (("embed", "embedding"), ("layers_0", "attn_norm", "scale")):
            np.testing.assert_array_equal(after[path], before[path])


def test_a_checkpoint_belongs_to_its_policies(trained: Trained) -> None:
    config = trained.config
    if trained.kind == "adapter":
        return
    # Adapters in another order, or other weights that are frozen.
    others = dict(reversed(config.policies.items()))
    if trained.kind == "weights":
        others = config.policies | {"judge": PolicyConfig()}
    model = load_model(config.model.name)
    if trained.kind == "adapters":
        model = adapted(model, LORA, config.seed, len(NAMES))
    with raises_coded(CheckpointError, "mismatch", "policies"):
        Replica(dataclasses.replace(config, policies=others), model)


# Adapters, or their own weights.
@pytest.mark.parametrize("kind", [pytest.param("adapters", marks=pytest.mark.slow), "weights"])
def test_dpo_teaches_each_policy_by_its_own_calls(kind: str, models: Path, tmp_path: Path) -> None:
    config = settings(
        kind,
        models,
        tmp_path / "run",
        num_steps=1,
        algorithm=AlgorithmConfig(loss="dpo"),
        rollout=RolloutConfig(tasks_per_step=4, group_size=8),
    )
    (row,) = asyncio.run(train(config, TASKS, []))
    for name in NAMES[:2]:
        assert row[f"train/num_pairs/policy={name}"] > 0.0
    # The mean over a policy's pairs is ln 2 while the policy equals its reference.
    losses = [row["train/loss"] / 2]
    if kind == "weights":
        losses = [row[f"train/loss/policy={name}"] for name in NAMES[:2]]
    assert losses == pytest.approx([np.log(2.0)] * len(losses), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "heads"), [("adapters", "shared"), ("weights", "per_policy")])
def test_a_joint_run_with_critics_and_a_warm_up(
    kind: str, heads: Any, models: Path, tmp_path: Path
) -> None:
    config = settings(
        kind,
        models,
        tmp_path / "run",
        num_steps=1,
        algorithm=AlgorithmConfig(
            policy_updates="joint", value_heads=heads, credit="learned", kl_coef=0.1
        ),
        warmup=WarmupConfig(num_steps=1, demonstrations=f"{TOY}:demonstrate", groups_per_step=1),
    )
    shown, row, final = asyncio.run(train(config, TASKS, TASKS))
    # Demonstrations name no policy, so all three learn them, including the frozen one.
    assert min(shown[f"warmup/grad_norm/policy={name}"] for name in NAMES) > 0.0
    assert row["train/kl_to_reference"] < 1e-6 and row["train/value_loss"] > 0.0
    assert "train/num_groups" in row and "train/num_groups/policy=speaker" not in row
    assert row.get("train/grad_norm/policy=judge", 0.0) == 0.0
    assert "eval/reward_mean" in final
    assert verify(tmp_path / "run").off == []


@pytest.mark.parametrize("broken", ["_policy_sequences", "_learn"])
def test_after_a_break_each_policy_goes_on_with_its_own_weights(
    broken: str,
    trained: Trained,
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The break is before the second step's rollouts, or before policies learn from them."""
    if trained.kind != "weights":
        return
    checkpoint = CheckpointConfig(every=1, keep=3 if broken == "_policy_sequences" else 1)
    config = settings("weights", models, tmp_path / "run", checkpoint=checkpoint)
    method = getattr(Run, broken)

    async def breaks(run: Run, *arguments: Any) -> Any:
        if run.step == 1:
            await run.saved()
            raise RuntimeError("the machine is gone")
        return await method(run, *arguments)

    monkeypatch.setattr(Run, broken, breaks)
    with pytest.raises(RuntimeError, match="the machine is gone"):
        asyncio.run(train(config, TASKS, []))
    monkeypatch.undo()
    *_, row = asyncio.run(train(config, TASKS, []))
    if broken == "_policy_sequences":
        assert row["train/mismatch_kl"] < 1e-5  # all its rollouts are from after the crash
        assert not verify(tmp_path / "run").off  # including the frozen policy
        return
    for name in NAMES:
        expected = exported(trained.run, name)
        for path, leaf in exported(tmp_path / "run", name).items():
            np.testing.assert_allclose(leaf, expected[path], atol=1e-6)


@pytest.mark.slow
def test_a_toy_task_is_learned_by_an_adapter_alone(models: Path, tmp_path: Path) -> None:
    config = settings("adapter", models, tmp_path / "run", num_steps=9)
    rows = asyncio.run(train(config, TASKS, TASKS))
    rewards = [row["rollout/reward_mean"] for row in rows if "rollout/reward_mean" in row]
    assert rewards[0] < 0.5 and rewards[-1] > 0.9
    assert max(row.get("train/mismatch_kl", 0.0) for row in rows) < 1e-5


def test_a_plan_has_room_for_all_adapters(models: Path, tmp_path: Path) -> None:
    config = settings("adapters", models, tmp_path)
    model = adapted(load_model(config.model.name), LORA, 0, len(NAMES)).config
    one = make_plan(model.with_execution(num_adapters=None), config)
    three = make_plan(model, config)
    sizes = [
        {item.name: item.num_bytes for item in plan.items}["optimizer moments"]
        for plan in (one, three)
    ]
    assert sizes[1] == 3 * sizes[0]
    for lowered in lower_step(
        phase_updater(model, config, supervised=False), config.model.dtype, config.distill
    ):
        assert "func" in lowered.as_text()
