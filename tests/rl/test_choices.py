"""Tests of custom functions for the settings that name one, against those of the package."""

from dataclasses import replace
from pathlib import Path

import custom
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from coded import raises_coded

from lightning_jax.errors import FieldError, InvalidValue
from lightning_jax.rl.advantages import BASELINES
from lightning_jax.rl.batches.batching import make_batches
from lightning_jax.rl.config import AlgorithmConfig, BatchConfig
from lightning_jax.rl.credit import SCHEMES
from lightning_jax.rl.losses.objectives import metric_names, policy_objective
from lightning_jax.rl.losses.ratios import CORRECTIONS
from lightning_jax.rl.losses.surrogates import LOSSES, cispo, clip
from lightning_jax.rl.prepare import prepare_step
from lightning_jax.settings import ConfigError, changed_keys, load_config, save_config
from lightning_jax.testing.records import sequence, trajectory, transition
from lightning_jax.testing.tiny import tiny_model
from lightning_jax.train.config import Config
from lightning_jax.train.state.updaters import phase_updater

STRICT_PROMOTION = False  # optax mixes dtypes
MODEL = tiny_model(num_layers=1)
FILE = Path(custom.__file__)
SMALL = [
    "batch.rows=1", "batch.row_len=64", "batch.max_targets=32", "batch.head_chunk=16",
    "serve.max_len=64", "mesh.fsdp=1", "optimizer.learning_rate=1e-2", "algorithm.normalize=none",
    "algorithm.skip_zero_advantage=false", "algorithm.num_epochs=2",
]  # fmt: skip
# Four rollouts of up to two calls, of which the second extends the first.
STEP = [
    trajectory(
        transition([1, 2], [3 + k, 4], reward=0.25 * k),
        *[transition([1, 2, 3 + k, 4, 5], [6, 7, 8 + k])] * (k != 1),
        reward=(k - 1.0) ** 2,
        rollout=str(k),
    )
    for k in range(4)
]
# The settings of the package that each function of tests/rl/custom.py repeats.
TWINS = {
    "loss": ("clip", []),
    "credit": ("per_step", ["algorithm.discount=0.5"]),
    "baseline": ("leave_one_out", []),
    "correction": (
        "mask",
        ["algorithm.correction_low=0.9", "algorithm.correction_high=1.1", "algorithm.proximal=old"],
    ),
}


def train_step(config: Config):
    """Return (params, metrics without times) after one step on STEP."""
    sequences, prepared = prepare_step(STEP, config.algorithm, policy_version=0)
    calls = [
        # Near the model's, which are about -5.5, so that bounds and masks leave some tokens out.
        replace(
            s, behavior_logprobs=tuple(-5.5 - 0.1 * i for i, _ in enumerate(s.behavior_logprobs))
        )
        for s in sequences
    ]
    updater = phase_updater(MODEL.config, config, supervised=False)
    state, metrics = updater.update(updater.init(jax.tree.map(jnp.copy, MODEL.params)), calls, None)
    assert metrics["train/num_updates"] == 2.0 and metrics["train/skipped_updates"] == 0.0
    metrics = {k: v for k, v in metrics.items() if not k.startswith("time/") and "per_s" not in k}
    return state.params, prepared | metrics


@pytest.mark.parametrize("setting", TWINS)
def test_a_custom_function_trains_like_the_one_it_repeats(setting):
    name, settings = TWINS[setting]
    argv = [*SMALL, *settings]
    of_file = load_config(Config, [*argv, f"algorithm.{setting}={FILE}:{name}"])
    assert getattr(of_file.algorithm, setting) == f"{FILE}:{name}"
    function = getattr(custom, name)
    algorithm = replace(of_file.algorithm, **{setting: function})
    params, metrics = train_step(load_config(Config, [*argv, f"algorithm.{setting}={name}"]))
    if setting == "loss":
        assert 0.0 < metrics["train/clip_fraction"] < 1.0
    if setting == "correction":
        assert 0.0 < metrics["train/correction_masked_share"] < 1.0
        metrics = {name.replace("_masked_", "_changed_"): v for name, v in metrics.items()}
    for config in (of_file, replace(of_file, algorithm=algorithm)):
        got, found = train_step(config)
        assert found == metrics
        jax.tree.map(np.testing.assert_array_equal, got, params)


@pytest.mark.parametrize(
    ("setting", "table"),
    [("loss", LOSSES), ("credit", SCHEMES), ("baseline", BASELINES), ("correction", CORRECTIONS)],
)
def test_every_name_of_a_table_is_a_setting(setting, table):
    for name in table:
        replace(AlgorithmConfig(proximal="old"), **{setting: name})
    with raises_coded(FieldError, "unknown", setting):
        replace(AlgorithmConfig(), **{setting: "magic"})


@pytest.mark.parametrize(
    ("setting", "function"),
    [
        ("loss", custom.only_loss),
        ("loss", custom.twice_the_rows),
        ("credit", custom.one_credit_too_few),
        ("credit", custom.tokens_miscounted),
        ("credit", custom.no_list),
        ("baseline", custom.one_number),
        ("correction", custom.flat),
    ],
)
def test_a_result_of_another_shape_is_refused(setting, function):
    algorithm = replace(AlgorithmConfig(), **{setting: function})
    with raises_coded(InvalidValue, "mismatch", f"algorithm.{setting}") as caught:
        prepare_step(STEP, algorithm, policy_version=0)
        metric_names(policy_objective(algorithm), None, False)
    assert function.__name__ in str(caught.value)


def test_what_cannot_be_known_of_a_custom_loss_is_not_assumed():
    assert AlgorithmConfig().has_only_policy_gradient
    algorithm = AlgorithmConfig(loss=custom.clip, credit=custom.per_step)
    assert not algorithm.has_only_policy_gradient
    assert not algorithm.has_critic and not algorithm.has_reference
    with raises_coded(FieldError, "conflict", "correction"):  # it may have the ratio already
        AlgorithmConfig(loss=custom.clip, correction="truncate")
    with raises_coded(FieldError, "conflict", "credit"):
        AlgorithmConfig(loss="dpo", credit=custom.per_step)
    with raises_coded(FieldError, "conflict", "value_coef"):
        AlgorithmConfig(credit=custom.per_step, value_coef=0.1)


def test_a_missing_function_is_refused_before_a_run_begins():
    for loss, reason in ((f"{FILE}:no", "no_such_function"), ("nowhere.py:loss", "not_found")):
        config = load_config(Config, [*SMALL, f"algorithm.loss={loss}"])
        with raises_coded(ConfigError, reason):
            phase_updater(MODEL.config, config, supervised=False)


def test_a_saved_function_is_readable_and_loads_if_it_can(tmp_path):
    path = tmp_path / "config.yaml"
    config = Config(algorithm=AlgorithmConfig(loss=clip(0.1), credit=custom.per_step))
    save_config(config, path)
    assert changed_keys(path, config) == []
    other = replace(config, algorithm=AlgorithmConfig(loss=cispo(0.1)))
    assert changed_keys(path, other) == ["algorithm.credit", "algorithm.loss"]
    saved = load_config(Config, [str(path)]).algorithm
    assert saved.credit == "custom:per_step"
    assert saved.loss == "lightning_jax.rl.losses.surrogates:clip.<locals>.loss"
    rewards = [trajectory(transition([1], [2]), reward=r, rollout=str(r)) for r in (0.0, 1.0)]
    assert prepare_step(rewards, saved, policy_version=0)[0]
    with raises_coded(ConfigError, "not_loaded", str(saved.loss)):
        policy_objective(saved)


def test_a_constructor_of_the_package_is_a_choice():
    (batch,), _ = make_batches(
        [sequence([1, 2], [3, 4], advantage=1.0)],
        BatchConfig(rows=1, row_len=16, max_targets=8, head_chunk=4),
    )
    inputs = jnp.full((1, 8), -0.4), None, jax.tree.map(jnp.asarray, batch), None
    by_name, by_function = (
        policy_objective(loss=loss, clip_low=0.1, clip_high=0.1)(*inputs)
        for loss in ("cispo", cispo(0.1, 0.1))
    )
    assert by_name == by_function
