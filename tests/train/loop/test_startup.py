"""Tests of how a run loads its model."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from coded import raises_coded

from lightning_jax.models.config import LoraConfig, ModelConfig
from lightning_jax.models.formats.load import ModelReader
from lightning_jax.models.lora import adapted
from lightning_jax.settings import ConfigError, load_config
from lightning_jax.testing.tiny import TINY_RUN, tiny_model
from lightning_jax.train.config import Config
from lightning_jax.train.loop.startup import load_trainable
from lightning_jax.train.loop.trainer import train
from lightning_jax.train.memory import plan
from lightning_jax.train.state.export import export


def test_a_run_that_does_not_fit_reads_no_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    monkeypatch.setattr(plan, "device_capacity", lambda: 1000)
    monkeypatch.setattr(ModelReader, "load", lambda self, shardings=None: reads.append(self.name))
    settings = {**TINY_RUN, "model.name": "tiny", "run_dir": tmp_path / "run"}
    config = load_config(Config, [f"{key}={value}" for key, value in settings.items()])

    async def agent(task: object, llm: object) -> float:
        return 1.0

    with raises_coded(ConfigError, "too_large"):
        asyncio.run(train(config, [{"id": "a"}], [], agent=agent))
    assert reads == []


@pytest.mark.parametrize(
    ("dtype", "rank", "is_told"),
    [("bfloat16", 2, True), ("float32", 2, False), ("bfloat16", 0, False)],
)
def test_adapters_that_begin_beside_rounded_ones_are_told_of(
    dtype: str, rank: int, is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lora = LoraConfig(rank=2)
    model = adapted(tiny_model(num_layers=1), lora)
    export(tmp_path, model, "", model.params, {})
    config = load_config(Config, [f"{key}={value}" for key, value in TINY_RUN.items()])
    named = ModelConfig(str(tmp_path / "policy"), lora=replace(lora, rank=rank))
    load_trainable(replace(config, model=replace(named, dtype=dtype)))
    assert ("adapters merged into" in caplog.text) == is_told
