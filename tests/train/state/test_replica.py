"""Tests of a replica with adapters: trained and frozen parts, and the contents of a checkpoint."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from coded import raises_coded

from lightning_jax.engine.config import ServeConfig
from lightning_jax.models.config import LoraConfig, MeshConfig, ModelConfig
from lightning_jax.models.formats.param_names import flatten
from lightning_jax.models.lora import adapted, trained_part
from lightning_jax.rl.config import AlgorithmConfig, BatchConfig, OptimizerConfig
from lightning_jax.rl.sequence import StateValues
from lightning_jax.testing.records import sequence
from lightning_jax.testing.tiny import tiny_model
from lightning_jax.train.config import Config, WarmupConfig
from lightning_jax.train.state.checkpoint import CheckpointError
from lightning_jax.train.state.replica import Replica

MODEL = partial(tiny_model, num_layers=1)
LORA = LoraConfig(rank=4, alpha=8.0)
STATES = StateValues((0,), (0.0,), (1.0,))
STEPS = [
    [
        dataclasses.replace(
            sequence([1, k, s], [k + 3, s + 1], advantage=(-1.0) ** k, weight=0.05), states=STATES
        )
        for k in range(8)
    ]
    for s in range(3)
]


def settings(run_dir: Path, lora: LoraConfig = LORA, **changes: Any) -> Config:
    config = Config(
        run_dir=str(run_dir),
        model=ModelConfig(lora=lora),
        serve=ServeConfig(max_len=16),
        batch=BatchConfig(rows=8, row_len=16, max_targets=8, head_chunk=4),
        optimizer=OptimizerConfig(learning_rate=1e-2, max_grad_norm=1e6),
        algorithm=AlgorithmConfig(credit="learned"),
        mesh=MeshConfig(fsdp=1),
    )
    return dataclasses.replace(config, **changes)


def replica(config: Config) -> Replica:
    return Replica(config, adapted(MODEL(), config.model.lora, config.seed))


def host(tree: Any) -> dict:
    return {path: np.asarray(leaf) for path, leaf in flatten(tree).items()}


def test_only_adapters_move_and_eight_devices_agree_with_one(tmp_path: Path) -> None:
    found = []
    for name, mesh in (("one", MeshConfig(fsdp=1)), ("eight", MeshConfig(2, 2, 2))):
        made = replica(settings(tmp_path / name, mesh=mesh))
        before, buffers = host(made.states[0].base), flatten(made.states[0].base)
        norms = [made.update(step)["train/grad_norm"] for step in STEPS]
        assert min(norms) > 0
        after = host(made.states[0].base)
        assert before.keys() == host(MODEL().params).keys()
        for path, leaf in after.items():
            assert leaf.tobytes() == before[path].tobytes()
            assert flatten(made.states[0].base)[path] is buffers[path]  # not copied either
        assert {path[-1] for path in flatten(made.states[0].params)} == {"lora_a", "lora_b"}
        moments = optax.tree.get(made.states[0].opt_state, "mu")
        assert jax.tree.structure(moments) == jax.tree.structure(made.states[0].params)
        found.append(host(made.states[0].params))
        assert made.learner.mesh.size == (1 if name == "one" else 8)
        made.close()
    start = host(trained_part(adapted(MODEL(), LORA, 0).params))
    for path, leaf in found[0].items():
        assert np.abs(leaf - start[path]).max() > 1e-3
        np.testing.assert_allclose(found[1][path], leaf, atol=1e-5)


def test_a_checkpoint_holds_the_adapters_and_goes_on_over_the_base(tmp_path: Path) -> None:
    config = settings(tmp_path)
    made = replica(config)
    made.update(STEPS[0])
    assert np.any(made.states[0].critic.head.kernel)
    made.advance()
    made.save({"tasks": 5})
    (described,) = (tmp_path / "checkpoints").glob("1/progress/metadata")
    saved = {name for name in json.loads(described.read_text())["shapes"] if "params" in name}
    assert saved and all("lora_" in name for name in saved)
    again = replica(config)
    assert again.step == 1 and again.progress is not None and again.progress["tasks"] == 5
    for got, want in zip(*map(jax.tree.leaves, (again.states, made.states)), strict=True):
        np.testing.assert_array_equal(got, want)
    again.close()
    made.close()
    assert not (tmp_path / "reference").exists()  # no reference without a KL term
    for lora, key, values in (
        (LoraConfig(rank=2, alpha=8.0), "['down']['lora_a']", ("[64, 4]", "[64, 2]")),
        (LoraConfig(rank=4, alpha=8.0, targets=("q",)), "['down']['lora_a']", ("None",)),
        (LoraConfig(rank=4, alpha=4.0), "model.lora.alpha", ("8.0", "4.0")),
        (LoraConfig(), "", ("None",)),
    ):
        other = dataclasses.replace(config, model=ModelConfig(lora=lora))
        with raises_coded(CheckpointError, "mismatch") as caught:
            replica(other)
        assert key in (caught.value.key or "")
        assert all(value in str(caught.value) for value in values)
    with raises_coded(CheckpointError, "mismatch", "weights of checksum"):
        Replica(config, adapted(MODEL(1), LORA, config.seed))


def test_the_reference_is_what_the_warmup_made_of_the_adapters(tmp_path: Path) -> None:
    config = settings(
        tmp_path,
        algorithm=AlgorithmConfig(kl_coef=0.1),
        warmup=WarmupConfig(num_steps=1, demonstrations="some:where"),
    )
    made = replica(config)
    start = host(made.states[0].params)
    made.update(STEPS[0])
    assert made.reference == [None] and not (tmp_path / "reference").exists()
    made.advance()
    reference = host(made.reference[0])
    assert reference.keys() == start.keys()
    assert not np.allclose(reference["layers_0", "q", "lora_b"], 0.0)  # the warm-up trains it
    kls = []
    for step in STEPS:
        kls.append(made.update(step)["train/kl_to_reference"])
        made.advance()
    assert kls[0] == pytest.approx(0.0, abs=1e-6) and kls[-1] > 1e-5
    for path, leaf in host(made.reference[0]).items():
        np.testing.assert_array_equal(leaf, reference[path])
    made.save({})
    (described,) = (tmp_path / "reference").glob("*/progress/metadata")
    kept = list(json.loads(described.read_text())["shapes"])
    assert kept and not any("opt_state" in name or "critic" in name for name in kept)
    again = replica(config)
    for path, leaf in host(again.reference[0]).items():
        np.testing.assert_array_equal(leaf, reference[path])
    again.close()
    made.close()


def test_the_reference_of_an_attempt_before_is_not_kept(tmp_path: Path) -> None:
    """It stopped after its warm-up, without a checkpoint. The next one has another warm-up."""
    algorithm = AlgorithmConfig(kl_coef=0.1)
    for learning_rate in (1e-1, 1e-3):
        warmup = WarmupConfig(
            num_steps=1, demonstrations="a:b", optimizer=OptimizerConfig(learning_rate)
        )
        made = replica(settings(tmp_path, algorithm=algorithm, warmup=warmup))
        made.update(STEPS[0])
        made.advance()
        present = host(made.states[0].params)
        for path, leaf in host(made.reference[0]).items():
            np.testing.assert_array_equal(leaf, present[path])
        made.close()
