"""Tests of several policies in a replica: separate ones end as if alone, joint ones as one."""

import dataclasses
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lightning_jax.engine.config import ServeConfig
from lightning_jax.models.config import LoraConfig, MeshConfig, ModelConfig, PolicyConfig
from lightning_jax.models.formats.load import LoadedModel
from lightning_jax.models.formats.param_names import flatten
from lightning_jax.models.lora import one_of
from lightning_jax.rl.config import AlgorithmConfig, BatchConfig, OptimizerConfig
from lightning_jax.rl.prepare import prepare_policies
from lightning_jax.rl.sequence import TrainingSequence
from lightning_jax.rl.update.updater import Updater
from lightning_jax.testing.records import sequence, trajectory, transition
from lightning_jax.testing.tiny import tiny_model, tiny_policies
from lightning_jax.train.config import Config, WarmupConfig
from lightning_jax.train.state.checkpoint import Checkpointer
from lightning_jax.train.state.replica import Replica
from lightning_jax.train.state.updaters import phase_updater

LORA = LoraConfig(rank=2, alpha=4.0, targets=("q", "down"))
CONFIG = Config(
    algorithm=AlgorithmConfig(num_epochs=2, num_minibatches=2),
    serve=ServeConfig(max_len=32),
    batch=BatchConfig(rows=2, row_len=32, max_targets=16, head_chunk=16),
    # The clip is active, and the learning rate depends on each policy's number of updates.
    optimizer=OptimizerConfig(3e-3, warmup_steps=3, weight_decay=0.1, max_grad_norm=1e-3),
    mesh=MeshConfig(fsdp=1),
)
BOTH = {"a": PolicyConfig(), "b": PolicyConfig()}
MODEL = tiny_policies(LORA)
KINDS = pytest.mark.parametrize("kind", ["adapters", "weights"])


def settings(kind: str, policies: dict[str, PolicyConfig] = BOTH, **algorithm: Any) -> Config:
    return dataclasses.replace(
        CONFIG,
        model=ModelConfig(lora=LORA if kind == "adapters" else LoraConfig()),
        policies=policies,
        algorithm=dataclasses.replace(CONFIG.algorithm, **algorithm),
    )


def replica(config: Config, directory: Path, alone: int | None = None) -> Replica:
    """Return a replica of both policies, or of the one with the index `alone`."""
    model = tiny_model(num_layers=1)
    if config.model.lora.rank:
        model = MODEL if alone is None else one_of(MODEL, alone)
        model = dataclasses.replace(model, params=jax.tree.map(np.array, model.params))
    return Replica(dataclasses.replace(config, run_dir=str(directory)), model)


def trained(made: Replica, steps: Any) -> list[dict[str, float]]:
    rows = []
    for sequences in steps:
        rows.append(made.update(sequences))
        made.advance()
    return rows


def params(made: Replica, name: str = "", tree: Any = None) -> dict[Any, np.ndarray]:
    """Return the trained weights of a policy, or its part of a tree of all trained weights."""
    row = made.config.policy_table.row(name)
    assert row is not None
    leaves = flatten(jax.device_get((tree or [s.params for s in made.states])[row.weights]))
    index = ... if row.adapter is None else row.adapter
    return {path: np.asarray(leaf)[index] for path, leaf in leaves.items()}


def assert_same(ours: Any, theirs: Any) -> None:
    assert ours.keys() == theirs.keys()
    for path, leaf in ours.items():
        np.testing.assert_allclose(leaf, theirs[path], atol=1e-6)


def some(first: int, policies: str, advantage: float = 1.0) -> list[TrainingSequence]:
    """Return one sequence per letter, for policy a or b."""
    return [
        dataclasses.replace(
            sequence([1, 2, first + i], [9, first + i, 7], advantage=advantage * (-1.2) ** i),
            adapter="ab".index(letter),
        )
        for i, letter in enumerate(policies)
    ]


STEPS = [some(10, "abbaabb"), some(30, "bbb"), some(50, "ab")]  # a has no sequence in the second


def sequences_of(steps: Any, index: int) -> list[list[TrainingSequence]]:
    return [
        [dataclasses.replace(item, adapter=None) for item in step if item.adapter == index]
        for step in steps
    ]


@KINDS
def test_policies_end_where_each_ends_alone_and_after_a_break_too(
    kind: str, tmp_path: Path
) -> None:
    config = settings(kind, kl_coef=0.1)
    both = replica(config, tmp_path / "both")
    start = {name: params(both, name) for name in "ab"}
    rows = trained(both, STEPS[:2])
    both.save({})
    both.close()
    both = replica(config, tmp_path / "both")
    assert both.step == 2
    trained(both, STEPS[2:])
    for index, name in enumerate("ab"):
        single = replica(settings(kind, {}, kl_coef=0.1), tmp_path / name, index)
        rows_alone = trained(single, sequences_of(STEPS, index))
        ours = params(both, name)
        assert_same(ours, params(single))
        assert min(np.abs(leaf - start[name][path]).max() for path, leaf in ours.items()) > 1e-4
        assert_same(params(both, name, both.reference), start[name])
        # Over four updates, as alone; the policy with one sequence has two.
        norm = rows[0][f"train/grad_norm/policy={name}"]
        assert norm == pytest.approx(rows_alone[0]["train/grad_norm"], rel=1e-4)
        single.close()
    assert rows[0]["train/num_updates"] == {"adapters": 4.0, "weights": 8.0}[kind]
    assert rows[1]["train/skipped_updates"] == 0.0
    both.close()


@KINDS
def test_a_gradient_that_is_not_finite_stops_its_own_policy(kind: str, tmp_path: Path) -> None:
    broken = [[*some(10, "aaa"), *some(20, "bbb", advantage=float("nan"))]]
    single = replica(settings(kind, {}), tmp_path / "single", 0)
    trained(single, sequences_of(broken, 0))
    with closing(replica(settings(kind), tmp_path / "both")) as both:
        start = params(both, "b")
        (row,) = trained(both, broken)
        assert_same(params(both, "a"), params(single))
        for path, leaf in params(both, "b").items():
            np.testing.assert_array_equal(leaf, start[path])
    assert row["train/skipped_updates"] == row["train/skipped_updates/policy=b"] == 4.0
    assert row["train/skipped_updates/policy=a"] == 0.0
    single.close()


def test_frozen_weights_change_in_a_warm_up_only(tmp_path: Path) -> None:
    """They are published after its last step, and not again."""
    policies = {"a": PolicyConfig(), "b": PolicyConfig(trains=False)}
    warmup = WarmupConfig(num_steps=2, demonstrations="demos.py:make")
    config = dataclasses.replace(settings("weights", policies), warmup=warmup)
    made, changed = replica(config, tmp_path), []
    for _ in range(4):
        made.advance()
        changed.append([policy.name for policy in made.changed])
    assert changed == [["a", "b"], ["a", "b"], ["a"], ["a"]]
    made.save({})
    made.close()
    with closing(Checkpointer(tmp_path / "checkpoints", config.checkpoint)) as checkpoints:
        saved = checkpoints.restore_params(made.states[1].params, 4, "b")  # by policy
    assert_same(flatten(saved), params(made, "b"))


# What only adapters have: one update of all policies, and value heads side by side.


def start(learner: Updater) -> Any:
    return learner.init(jax.tree.map(jnp.copy, MODEL.params))


def updater(config: Config, model: LoadedModel = MODEL) -> Updater:
    return phase_updater(model.config, config, supervised=False)


def ended(learner: Updater, steps: Any) -> tuple[dict, list[dict]]:
    state, rows = start(learner), []
    for sequences in steps:
        state, metrics = learner.update(state, sequences, None)
        rows.append(metrics)
    return flatten(jax.device_get(state.params)), rows


def test_a_joint_step_is_one_step_over_both() -> None:
    joint, before = settings("adapters", policy_updates="joint"), flatten(MODEL.params)
    # The optimizer of a single policy over all adapters: one norm, one count.
    plain = dataclasses.replace(joint, policies={})
    one, (row, *_) = ended(updater(joint), STEPS)
    other, _ = ended(updater(plain), STEPS)
    separate, _ = ended(updater(settings("adapters")), STEPS)
    assert_same(one, other)  # two programs, whose sums some processors round differently
    assert max(np.abs(one[path] - separate[path]).max() for path in one) > 1e-4
    norms = [row[f"train/grad_norm/policy={name}"] for name in "ab"]
    assert row["train/grad_norm"] <= sum(norms) * (1 + 1e-6)
    bad = [
        dataclasses.replace(call, advantage=float("nan")) if call.adapter else call
        for call in some(10, "abab")
    ]
    one_minibatch = settings("adapters", policy_updates="joint", num_minibatches=1)
    stopped, _ = ended(updater(one_minibatch), [bad])
    for path, leaf in stopped.items():
        np.testing.assert_array_equal(leaf, before[path])
    policies = {"a": PolicyConfig(), "b": PolicyConfig(trains=False)}
    frozen = updater(settings("adapters", policies, policy_updates="joint"))
    held, _ = ended(frozen, [some(10, "aaaa")])  # despite weight decay
    for path, leaf in held.items():
        assert np.abs(leaf[0] - before[path][0]).max() > 1e-4
        np.testing.assert_array_equal(leaf[1], before[path][1])


def rollouts() -> list:
    def call(policy: str, token: int) -> Any:
        return dataclasses.replace(transition([1, token], [token, 9]), answered_by=policy)

    return [
        trajectory(call("a", 2), call("b", 3), call("a", 4), reward=1.0),
        trajectory(call("a", 5), call("b", 6), reward=0.0),
        trajectory(call("b", 7), call("a", 8), reward=0.5),
    ]


@pytest.mark.parametrize(
    "kind",
    [
        "independent",
        pytest.param("joint", marks=pytest.mark.slow),
        pytest.param("joint, shared", marks=pytest.mark.slow),
    ],
)
def test_value_heads_of_several_policies(kind: str) -> None:
    updates: Any = kind.partition(", ")[0]
    heads: Any = kind.partition(", ")[2]
    algorithm = AlgorithmConfig(
        credit="learned",
        policy_updates=updates,
        value_heads=heads or "per_policy",
        value_learning_rate=0.1,
    )
    config, step = dataclasses.replace(settings("adapters"), algorithm=algorithm), rollouts()

    def critic(config: Config) -> Any:
        """Return the value heads after three steps."""
        learner = updater(config)
        state = start(learner)
        for _ in range(3):
            values, _ = learner.values(state, step)
            sequences, _ = prepare_policies(
                step, algorithm, config.policy_table, policy_version=0, values=values
            )
            state, _ = learner.update(state, sequences, None)
        assert state.critic is not None
        return jax.device_get(state.critic.head)

    head = critic(config)
    if heads == "shared":
        assert head.kernel.shape == (32,)
        return
    assert head.kernel.shape == (2, 32) and np.abs(head.kernel[0] - head.kernel[1]).max() > 1e-3
    if updates == "joint":
        return
    # With the other policy frozen, the result is the same: its head has no effect.
    others = {"a": PolicyConfig(trains=False), "b": PolicyConfig()}
    alone = critic(dataclasses.replace(config, policies=others))
    np.testing.assert_allclose(alone.kernel[1], head.kernel[1], atol=1e-6)
    np.testing.assert_array_equal(alone.kernel[0], 0.0)
