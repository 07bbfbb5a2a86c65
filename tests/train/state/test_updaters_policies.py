"""Tests of several policies in one learner: separate ones end as if alone, joint ones as one."""

import dataclasses
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
from lightning_jax.testing.tiny import tiny_policies
from lightning_jax.train.config import Config
from lightning_jax.train.state.updaters import phase_updater

LORA = LoraConfig(rank=2, alpha=4.0, targets=("q", "down"))
CONFIG = Config(
    model=ModelConfig(lora=LORA),
    algorithm=AlgorithmConfig(num_epochs=2, num_minibatches=2),
    serve=ServeConfig(max_len=32),
    batch=BatchConfig(rows=2, row_len=32, max_targets=16, head_chunk=16),
    # The clip is active, and the learning rate depends on each policy's number of updates.
    optimizer=OptimizerConfig(3e-3, warmup_steps=3, weight_decay=0.1, max_grad_norm=1e-3),
    mesh=MeshConfig(fsdp=1),
)
BOTH = dataclasses.replace(CONFIG, policies={"a": PolicyConfig(), "b": PolicyConfig()})


MODEL = tiny_policies(LORA)
ALONE = [one_of(MODEL, index) for index in (0, 1)]


def some(first: int, adapters: str, advantage: float = 1.0) -> list[TrainingSequence]:
    """Return one sequence per letter, for policy a or b."""
    return [
        dataclasses.replace(
            sequence([1, 2, first + i], [9, first + i, 7], advantage=advantage * (-1.2) ** i),
            adapter="ab".index(letter),
        )
        for i, letter in enumerate(adapters)
    ]


STEPS = [some(10, "abbaabb"), some(30, "bbb"), some(50, "ab")]  # a has no sequence in the second


def start(learner: Updater, model: LoadedModel) -> Any:
    return learner.init(jax.tree.map(jnp.copy, model.params))


def trained(learner: Updater, model: LoadedModel, steps: Any) -> tuple[dict, list[dict]]:
    state, rows = start(learner, model), []
    for sequences in steps:
        state, metrics = learner.update(state, sequences, None)
        rows.append(metrics)
    return flatten(jax.device_get(state.params)), rows


@pytest.fixture(scope="module")
def alone() -> Updater:
    return phase_updater(ALONE[0].config, CONFIG, supervised=False)


@pytest.fixture(scope="module")
def independent() -> Updater:
    return phase_updater(MODEL.config, BOTH, supervised=False)


def sequences_of(steps: Any, index: int) -> list[list[TrainingSequence]]:
    return [
        [
            dataclasses.replace(sequence, adapter=None)
            for sequence in step
            if sequence.adapter == index
        ]
        for step in steps
    ]


def test_independent_policies_end_where_each_ends_alone(
    alone: Updater, independent: Updater
) -> None:
    mixed, rows = trained(independent, MODEL, STEPS)
    for index, model in enumerate(ALONE):
        single, rows_alone = trained(alone, model, sequences_of(STEPS, index))
        before = flatten(model.params)
        for path, leaf in single.items():
            assert np.abs(leaf - before[path]).max() > 1e-4
            np.testing.assert_allclose(mixed[path][index], leaf, atol=1e-6)
        name = f"train/grad_norm/policy={'ab'[index]}"
        # Over four updates, as alone; the policy with one sequence has two.
        assert rows[0][name] == pytest.approx(rows_alone[0]["train/grad_norm"], rel=1e-4)
    assert rows[0]["train/num_updates"] == 4.0 and rows[1]["train/skipped_updates"] == 0.0


def test_a_gradient_that_is_not_finite_stops_its_own_policy(
    alone: Updater, independent: Updater
) -> None:
    broken = [[*some(10, "aaa"), *some(20, "bbb", advantage=float("nan"))]]
    mixed, (row,) = trained(independent, MODEL, broken)
    single, _ = trained(alone, ALONE[0], sequences_of(broken, 0))
    for path, leaf in single.items():
        np.testing.assert_allclose(mixed[path][0], leaf, atol=1e-6)
        np.testing.assert_array_equal(mixed[path][1], flatten(MODEL.params)[path][1])
    assert row["train/skipped_updates"] == row["train/skipped_updates/policy=b"] == 4.0
    assert row["train/skipped_updates/policy=a"] == 0.0


def joint(**policies: PolicyConfig) -> Config:
    algorithm = dataclasses.replace(CONFIG.algorithm, policy_updates="joint")
    return dataclasses.replace(CONFIG, algorithm=algorithm, policies=policies)


def test_a_joint_step_is_one_step_over_both(independent: Updater) -> None:
    settings = joint(a=PolicyConfig(), b=PolicyConfig())
    learner = phase_updater(MODEL.config, settings, supervised=False)
    # The optimizer of a single policy over all adapters: one norm, one count.
    plain = phase_updater(
        MODEL.config, dataclasses.replace(settings, policies={}), supervised=False
    )
    one, (row, *_) = trained(learner, MODEL, STEPS)
    other, _ = trained(plain, MODEL, STEPS)
    separate, _ = trained(independent, MODEL, STEPS)
    for path, leaf in other.items():  # two programs, whose sums some processors round differently
        np.testing.assert_allclose(one[path], leaf, atol=1e-6)
    assert max(np.abs(one[path] - separate[path]).max() for path in one) > 1e-4
    norms = [row[f"train/grad_norm/policy={name}"] for name in "ab"]
    assert row["train/grad_norm"] <= sum(norms) * (1 + 1e-6)
    bad = [
        dataclasses.replace(call, advantage=float("nan")) if call.adapter else call
        for call in some(10, "abab")
    ]
    one_minibatch = dataclasses.replace(settings.algorithm, num_minibatches=1)
    settings = dataclasses.replace(settings, algorithm=one_minibatch)
    stopped, _ = trained(phase_updater(MODEL.config, settings, supervised=False), MODEL, [bad])
    for path, leaf in stopped.items():
        np.testing.assert_array_equal(leaf, flatten(MODEL.params)[path])
    frozen = phase_updater(
        MODEL.config, joint(a=PolicyConfig(), b=PolicyConfig(trains=False)), supervised=False
    )
    held, _ = trained(frozen, MODEL, [some(10, "aaaa")])  # despite weight decay
    for path, leaf in held.items():
        assert np.abs(leaf[0] - flatten(MODEL.params)[path][0]).max() > 1e-4
        np.testing.assert_array_equal(leaf[1], flatten(MODEL.params)[path][1])


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
    config = dataclasses.replace(BOTH, algorithm=algorithm)
    learner, step = phase_updater(MODEL.config, config, supervised=False), rollouts()

    def critic(learner: Updater, policies: Any) -> Any:
        """Return the value heads after three steps."""
        state = start(learner, MODEL)
        for _ in range(3):
            values, _ = learner.values(state, step)
            sequences, _ = prepare_policies(
                step, algorithm, policies, policy_version=0, values=values
            )
            state, _ = learner.update(state, sequences, None)
        assert state.critic is not None
        return jax.device_get(state.critic.head)

    head = critic(learner, config.policies)
    if heads == "shared":
        assert head.kernel.shape == (32,)
        return
    assert head.kernel.shape == (2, 32) and np.abs(head.kernel[0] - head.kernel[1]).max() > 1e-3
    if updates == "joint":
        return
    # With the other policy frozen, the result is the same: its head has no effect.
    others = {"a": PolicyConfig(trains=False), "b": PolicyConfig()}
    single = phase_updater(
        MODEL.config, dataclasses.replace(config, policies=others), supervised=False
    )
    alone = critic(single, others)
    np.testing.assert_allclose(alone.kernel[1], head.kernel[1], atol=1e-6)
    np.testing.assert_array_equal(alone.kernel[0], 0.0)
