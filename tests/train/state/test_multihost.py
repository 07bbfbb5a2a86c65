"""Tests of two processes that run the loop like one."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy
import toy_agent
from coded import raises_coded

from lightning_jax.cli.runtime import stop_on_sigterm
from lightning_jax.engine.config import ServeConfig
from lightning_jax.models.config import LoraConfig, MeshConfig, ModelConfig, PolicyConfig
from lightning_jax.models.formats.load import load_model, save_hf
from lightning_jax.rl.config import AlgorithmConfig, BatchConfig, OptimizerConfig
from lightning_jax.rollouts.config import AgentConfig, PromptSearchConfig, RolloutConfig
from lightning_jax.settings import ConfigError
from lightning_jax.system.network import free_port
from lightning_jax.testing.tiny import tiny_model
from lightning_jax.traces.config import RoleConfig
from lightning_jax.traces.store import Store
from lightning_jax.train.config import (
    CheckpointConfig,
    Config,
    DistributedConfig,
    EvalConfig,
    WarmupConfig,
)
from lightning_jax.train.loop.trainer import train
from lightning_jax.train.prompts.chosen import read_chosen
from lightning_jax.train.state import multihost
from lightning_jax.train.state.checkpoint import Checkpointer
from lightning_jax.train.state.updaters import phase_updater
from lightning_jax.train.watch.metrics import read_metrics
from lightning_jax.types import Task

TOY = Path(toy_agent.__file__)
PATH = [str(TOY.parent), str(Path(__file__).parents[1]), str(Path(__file__).parent)]
ROUNDING = 1e-6  # 6e-8 was measured
EPS = 1e-3  # AdamW with a smaller one turns rounding of tiny gradients into visible steps
TASKS: list[Task] = [{"id": f"t{i}", "question": "ab"[i]} for i in range(2)]


def config(
    model_dir: Path, run_dir: Path, distributed_: DistributedConfig, kind: str = "whole"
) -> Config:
    """Return settings for a warm-up step and two policy steps with a reference, on four devices.

    Requests run one at a time, so that the same weights sample the same tokens. `kind` selects the
    trained weights: all of them (also with DPO), adapters, several adapters, or policies' own
    weights.
    """
    rank, names, function = (4 if kind in ("adapters", "policies") else 0), (), "run"
    algorithm = AlgorithmConfig(loss="dpo") if kind == "dpo" else AlgorithmConfig(kl_coef=0.1)
    if kind in ("policies", "own"):
        names, function = ("speaker", "listener", "judge"), "three_policies"
    if kind == "untrained":
        function, algorithm = "unrewarded", AlgorithmConfig()
    searched = kind == "prompts"  # by the initial weights, which both processes hold
    search = PromptSearchConfig(
        every=2, num_train=1, num_dev=1, minibatch=1, max_rollouts=4, max_tokens=8
    )
    return Config(
        run_dir=str(run_dir),
        prompts={"writer": "be brief"} if searched else {},
        prompt_search=search if searched else PromptSearchConfig(),
        num_steps=1000 if kind == "long" else 2,
        model=ModelConfig(name=str(model_dir), lora=LoraConfig(rank=rank)),
        serve=ServeConfig(
            slots=1,
            max_len=2048 if searched else 64,
            prefill_buckets=(512 if searched else 32,),
            mesh=MeshConfig(fsdp=1, tensor=_num_devices(kind)),
        ),
        policies={name: PolicyConfig(trains=name != "judge") for name in names},
        roles={name: RoleConfig(agent=name, policy=name) for name in names},
        agent=AgentConfig(f"{TOY}:{function}"),
        rollout=RolloutConfig(tasks_per_step=2, group_size=4, concurrency=1),
        algorithm=algorithm,
        batch=BatchConfig(rows=2, row_len=2048 if searched else 128, max_targets=32, head_chunk=32),
        optimizer=OptimizerConfig(learning_rate=1e-2, eps=EPS),
        warmup=WarmupConfig(
            num_steps=0 if kind == "untrained" else 1,
            demonstrations=f"{TOY}:demonstrate",
            optimizer=OptimizerConfig(learning_rate=1e-4, eps=EPS),
        ),
        eval=EvalConfig(every=0, num_tasks=2, at_start=False),
        checkpoint=CheckpointConfig(every=2, keep=2),
        mesh=MeshConfig(fsdp=2, tensor=_num_devices(kind)),
        distributed=distributed_,
    )


def run_process(model_dir: str, run_dir: str, port: str, process_id: str, kind: str) -> None:
    """Run one of the two processes."""
    distributed_ = DistributedConfig("manual", f"127.0.0.1:{port}", 2, int(process_id))
    settings = config(Path(model_dir), Path(run_dir), distributed_, kind)
    stop_on_sigterm()
    tasks = [{"id": f"t{i}", "question": "abcde"[i]} for i in range(5)]  # a search needs as many
    rows = asyncio.run(train(settings, tasks if kind == "prompts" else TASKS, TASKS))
    assert bool(rows) == (process_id == "0")
    assert jax.process_count() == 2 and jax.device_count() == 2 * _num_devices(kind)


def _num_devices(kind: str) -> int:
    """Return the devices of each process."""
    return 1 if kind == "untrained" else 2


def _start(*arguments: str) -> "subprocess.Popen[str]":
    code = f"import sys; sys.path[:0] = {PATH!r}; import test_multihost as t; "
    code += "t.run_process(*sys.argv[1:])"
    number = _num_devices(arguments[-1])
    environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={number}"}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def _run_two(folder: Path, kind: str) -> Path:
    """Run two processes of a kind to their end, and return the run directory."""
    model_dir, run = folder / "tiny", folder / "run"
    save_hf(model_dir, tiny_model())
    port = str(free_port())
    processes = [_start(str(model_dir), str(run), port, str(i), kind) for i in range(2)]
    for process in processes:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
    return run


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whole", "dpo", "adapters", "policies", "own"])
def test_two_processes_match_one(kind: str, tmp_path: Path) -> None:
    model_dir, one, two = tmp_path / "tiny", tmp_path / "one", tmp_path / "two"
    save_hf(model_dir, tiny_model())
    port = str(free_port())
    processes = [_start(str(model_dir), str(two), port, str(i), kind) for i in range(2)]
    asyncio.run(train(config(model_dir, one, DistributedConfig(), kind), TASKS, TASKS))
    for process in processes:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
    rows = [read_metrics(run / "metrics.jsonl") for run in (one, two)]
    assert len(rows[0]) == len(rows[1]) == 4
    for ours, theirs in zip(*rows, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            # This process has compiled programs for other tests.
            local = ("time/", "serve/publish", "serve/compiles")
            if not name.startswith(local) and "per_s" not in name:
                assert theirs[name] == pytest.approx(ours[name], rel=1e-3, abs=1e-5), name
    assert rows[1][1]["train/num_updates"] == (2 if kind == "own" else 1)
    assert rows[1][1]["train/grad_norm"] > 0
    # Rollouts, the store and the server exist only in process 0.
    store = Store(two / "store.sqlite")
    assert [r.status for r in store.rollouts(phase="train")] == ["scored"] * 2 * 8
    store.close()
    if kind in ("whole", "dpo"):
        _compare_weights(config(model_dir, two, DistributedConfig(), kind), one, two)
    else:
        name = {
            "adapters": "policy_adapter/adapter_model.safetensors",
            "policies": "policy_adapter/speaker/adapter_model.safetensors",
            "own": "policy/speaker/model.safetensors",
        }[kind]
        weights = [safetensors.numpy.load_file(run / name) for run in (one, two)]
        for ours, theirs in zip(*(params.values() for params in weights), strict=True):
            np.testing.assert_allclose(theirs, ours, atol=ROUNDING)
            assert np.any(ours)


@pytest.mark.slow
def test_checkpoint_of_weights_without_an_update_is_written(tmp_path: Path) -> None:
    run = _run_two(tmp_path, "untrained")
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["train/num_updates"] for row in rows[:2]] == [0, 0]
    assert sorted(int(path.name) for path in (run / "checkpoints").iterdir()) == [2]


@pytest.mark.slow
def test_two_processes_search_for_prompts(tmp_path: Path) -> None:
    run = _run_two(tmp_path, "prompts")
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows if "prompts/changed" in row] == [1]
    assert rows[1]["prompts/calls"] >= 1 and rows[1]["prompts/failed"] == 0
    assert [entry.step for entry in read_chosen(run)] == [1]
    assert rows[1]["train/num_updates"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_all_processes_stop_when_one_is_told_to(stopped: int, tmp_path: Path) -> None:
    model_dir, run = tmp_path / "tiny", tmp_path / "run"
    save_hf(model_dir, tiny_model())
    port = str(free_port())
    processes = [_start(str(model_dir), str(run), port, str(i), "long") for i in range(2)]
    rows = run / "metrics.jsonl"
    while not (rows.exists() and len(rows.read_text().splitlines()) > 3):
        assert all(process.poll() is None for process in processes)
        time.sleep(0.1)
    processes[stopped].terminate()
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert "KeyboardInterrupt" in outputs[stopped]
    if stopped == 1:
        assert "process 1 of 2 received a stop signal" in outputs[0]
    else:
        assert processes[1].returncode == 0, outputs[1]


def _compare_weights(settings: Config, one: Path, two: Path) -> None:
    """Check that the exports and the checkpoints of both runs hold the same weights."""
    model, alone = load_model(str(two / "policy")), load_model(str(one / "policy"))
    learner = phase_updater(model.config, settings, supervised=False)
    checkpointer = Checkpointer(two / "checkpoints", settings.checkpoint)
    assert checkpointer.steps == [2, 3]
    saved = checkpointer.restore(learner.init(jax.tree.map(jax.numpy.copy, model.params)))
    checkpointer.close()
    initial = load_model(settings.model.name).params
    triples = (model.params, alone.params, saved.params, initial)
    for got, want, kept, before in zip(*map(jax.tree.leaves, triples), strict=True):
        np.testing.assert_allclose(got, want, atol=ROUNDING)
        np.testing.assert_array_equal(got, kept)
        assert np.abs(np.asarray(got) - np.asarray(before)).max() > 1e-3


def test_one_process_calls_itself() -> None:
    calls: list[str] = []
    leader = multihost.Leader(calls)
    leader.call(list.append, "here")
    leader.tell(list.append, "elsewhere")
    leader.stop_followers()
    assert calls == ["here"] and multihost.is_leader()


def test_a_late_join_is_refused_in_a_sentence() -> None:
    assert jax.devices()  # initializes JAX
    with raises_coded(ConfigError, "not_joined", "distributed.mode"):
        multihost.join(DistributedConfig("manual", "127.0.0.1:1", 2, 1))
