"""Tests of how a run loads its model."""

import asyncio
from pathlib import Path

import pytest
from coded import raises_coded

from lightning_jax.models.formats.load import ModelReader
from lightning_jax.settings import ConfigError, load_config
from lightning_jax.testing.tiny import TINY_RUN
from lightning_jax.train.config import Config
from lightning_jax.train.loop.trainer import train
from lightning_jax.train.memory import plan


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
