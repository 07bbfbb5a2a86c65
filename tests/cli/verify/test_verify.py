"""Tests that a run's record is checked against its weights, and that changed values are found."""

import asyncio
import contextlib
import json
import re
import shutil
import sqlite3
from pathlib import Path

import jax
import numpy as np
import pytest
from toy_runs import TASKS, toy_config

from lightning_jax.cli.main import main
from lightning_jax.cli.verify import VerifyError, as_text, verify
from lightning_jax.cli.verify.weights import find_sources
from lightning_jax.models.config import LoraConfig, ModelConfig
from lightning_jax.models.formats.load import save_hf
from lightning_jax.models.lora import adapted
from lightning_jax.models.policies import Policy
from lightning_jax.rl.config import OptimizerConfig
from lightning_jax.rollouts.config import RolloutConfig
from lightning_jax.settings import ConfigError
from lightning_jax.testing.tiny import tiny_model
from lightning_jax.traces import attributes
from lightning_jax.traces.store import Store
from lightning_jax.train.config import CheckpointConfig, Config, EvalConfig
from lightning_jax.train.loop.trainer import train
from lightning_jax.train.state.export import export


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train three steps with evaluations before and after. The run holds versions 0, 2 and 3."""
    directory = tmp_path_factory.mktemp("verify")
    save_hf(directory / "tiny", tiny_model(num_layers=1))
    config = toy_config(
        directory / "tiny",
        directory / "run",
        num_steps=3,
        rollout=RolloutConfig(tasks_per_step=2, group_size=4),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        eval=EvalConfig(every=0, num_tasks=2, at_start=True),
        checkpoint=CheckpointConfig(every=2, keep=2),
    )
    asyncio.run(train(config, TASKS, TASKS))
    return directory / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """Copy the run, for a test that changes it."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_an_honest_run_is_within_rounding(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = verify(trained)
    assert [(v.version, v.weights) for v in report.versions] == [
        (0, str(trained.parent / "tiny")),
        (2, "checkpoints/2"),
        (3, "checkpoints/3"),
    ]
    # Each version answers 8 training calls, and 2 more in each evaluation.
    calls = [sum(c.kind == "behavior" for c in v.comparisons) for v in report.versions]
    plain = [sum(c.kind == "sampling" for c in v.comparisons) for v in report.versions]
    assert (calls, plain) == ([10, 8, 2], [8, 8, 0])
    assert report.not_compared == {"weights_not_kept": 8}
    assert all(v.differences("behavior").max() < 1e-5 for v in report.versions)
    assert report.off == []
    assert main(["verify", str(trained)]) == 0
    printed = capsys.readouterr().out
    *_, not_compared, verdict = printed.splitlines()
    assert re.findall(r"[\d.]+", not_compared) == ["8"]
    assert re.findall(r"[\d.]+", verdict) == ["20", "0.001"]


def test_the_weights_of_another_version_do_not_fit(run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "2")
    (run / "checkpoints" / "3").rename(run / "checkpoints" / "2")
    report = verify(run)
    worst = {v.version: v.differences("behavior").max() for v in report.versions}
    assert worst[0] < 1e-5 < 1e-3 < worst[2]


def test_without_checkpoints_the_exported_policy_is_the_last_version(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    report = verify(run)
    assert [(v.version, v.weights) for v in report.versions][1:] == [(3, "policy")]
    assert report.not_compared == {"weights_not_kept": 16} and report.off == []
    (run / "policy.json").write_text('{"step": 2}')  # the run continued without a new export
    assert verify(run).not_compared == {"weights_not_kept": 18}


def test_a_base_with_merged_adapters_is_read_as_the_trainer_reads_it(tmp_path: Path) -> None:
    model = adapted(tiny_model(num_layers=1), LoraConfig(rank=2))
    export(tmp_path, model, "", model.params, {})
    config = Config(model=ModelConfig("tiny", "bfloat16"))
    row = Policy("a", base=str(tmp_path / "policy"))
    initial = tiny_model(num_layers=1).params
    read = find_sources(tmp_path / "run", config, 0, row)[0].load(initial)
    assert jax.tree.structure(read) == jax.tree.structure(initial)


def test_calls_that_the_run_has_set_aside_are_counted(run: Path) -> None:
    with contextlib.closing(Store(run / "store.sqlite")) as store:
        store.supersede(2)
    report = verify(run)
    assert report.not_compared["superseded"] > 0 and report.off == []


def test_one_falsified_number_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call_id, rollout_id, stored = _falsify(run, attributes.BEHAVIOR_LOGPROBS, by=0.01)
    (off,) = verify(run).off
    assert (off.call.call_id, off.kind, off.differences.argmax()) == (call_id, "behavior", 1)
    assert main(["verify", str(run)]) == 1
    printed = capsys.readouterr().out
    *_, named, verdict = printed.splitlines()
    assert call_id in named and rollout_id in named and "behavior" in named
    assert f"{stored + 0.01:.6f}" in named
    assert re.findall(r"[\d.]+", verdict) == ["0.001", "1", "20"]
    assert main(["verify", str(run), "--tolerance", "0.02"]) == 0


def test_a_falsified_sampling_logprob_and_a_missing_number_are_found(run: Path) -> None:
    call_id, _, _ = _falsify(run, attributes.SAMPLING_LOGPROBS, by=0.01)
    (off,) = verify(run).off
    assert (off.call.call_id, off.kind) == (call_id, "sampling")
    _falsify(run, attributes.BEHAVIOR_LOGPROBS, by=float("nan"))
    assert np.isinf(verify(run).off[0].differences.max())


def test_a_limit_is_spread_over_the_versions(trained: Path) -> None:
    report = verify(trained, limit=10)
    assert [v.version for v in report.versions] == [0, 2, 3]
    assert report.not_compared["beyond_the_limit"] == 10
    assert "10 calls" in as_text(report)


def test_mistakes_give_one_sentence(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run / "nowhere")]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    with pytest.raises(ConfigError) as missing:
        verify(run / "nowhere")
    assert missing.value.key == str(run / "nowhere")
    assert missing.value.reason == "not_found"
    assert str(run / "nowhere") in printed.err
    assert main(["verify", str(run), "--limit", "0"]) == 2
    assert main(["verify", str(run), "--tolerance", "nan"]) == 2
    shutil.rmtree(run / "checkpoints")
    with contextlib.closing(sqlite3.connect(run / "store.sqlite")) as db, db:
        db.execute("DELETE FROM rollouts WHERE step IN (0, 3)")
    with pytest.raises(VerifyError) as caught:
        verify(run)
    assert caught.value.reason == "nothing_to_compare" and "16" in str(caught.value)


def _falsify(run: Path, attribute: str, by: float) -> tuple[str, str, float]:
    """Add to the second number of a call of version 2. Return its id, rollout and old value."""
    with contextlib.closing(sqlite3.connect(run / "store.sqlite")) as db, db:
        call_id, rollout_id, text = db.execute(
            "SELECT span_id, rollout_id, attributes FROM spans JOIN rollouts USING (rollout_id) "
            "WHERE step = 2 AND phase = 'train' AND json_array_length(attributes, ?) > 1 LIMIT 1",
            (f'$."{attribute}"',),
        ).fetchone()
        values = json.loads(text)
        stored = values[attribute][1]
        values[attribute][1] += by
        db.execute(
            "UPDATE spans SET attributes = ? WHERE span_id = ?", (json.dumps(values), call_id)
        )
    return call_id, rollout_id, stored
