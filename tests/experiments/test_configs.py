"""Tests of the configs of the experiments."""

from inspect import signature
from pathlib import Path

import pytest

from lightning_jax.loading import check_reference, load_function
from lightning_jax.settings import ConfigError, load_config
from lightning_jax.train.config import Config

CONFIGS = Path(__file__).parents[2] / "experiments" / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_the_configs_load_and_name_their_run(path: Path) -> None:
    argv = [str(path)]
    if "root: ???" in path.read_text() or path.stem == "spider_coder_gpu":
        with pytest.raises(ConfigError) as caught:
            load_config(Config, argv)
        assert "data.root=VALUE" in str(caught.value)
        argv = [*argv, "data.root=DIR"]
    config = load_config(Config, argv)
    assert config.run_dir == f"runs/{path.stem}"
    for reference in (config.agent.function, config.data.load, config.warmup.demonstrations):
        if reference is not None:
            check_reference(reference)
    assert config.agent.function and config.data.load
    assert (
        config.data.options.keys() <= signature(load_function(config.data.load)).parameters.keys()
    )
