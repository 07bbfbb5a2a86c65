"""Tests of the configs of the experiments."""

import math
import re
from inspect import signature
from pathlib import Path

import pytest

from lightning_jax.settings import ConfigError, load_config
from lightning_jax.settings.loading import check_reference, load_function
from lightning_jax.train.config import Config

CONFIGS = Path(__file__).parents[2] / "experiments" / "configs"
# Agents that pay for the form of a reply, even if its answer is wrong.
PAYS_FOR_FORM = ("musique_rag.py:run", "from_scratch.py:run", "harbor:run")
# Devices of a config for a model of 1B parameters or more, of which one process serves.
DEVICES = {"spider_8b_tpu": 4} | {f"{name}_tpu": 8 for name in ("calcx", "musique", "spider")}
# For each agent, the least number of tokens for a reply of such a model, and replies with the most.
REPLIES = {
    "calcx_math": {"max_tokens": (512, 8)},
    "musique_rag": {"max_tokens": (256, 8)},
    "spider_sql": {"sql_tokens": (256, 3), "verdict_tokens": (16, 2)},
}


def _load(path: Path) -> Config:
    needs_root = "root: ???" in path.read_text() or path.stem == "spider_coder_gpu"
    return load_config(Config, [str(path), *["data.root=DIR"] * needs_root])


def _billions(config: Config) -> float:
    found = re.search(r"(\d+(?:\.\d+)?)B\b", config.model.name)
    return float(found[1]) if found else 0.0


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


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_a_small_reward_for_the_form_stays_small(path: Path) -> None:
    config = _load(path)
    pays = config.agent.function is not None and config.agent.function.endswith(PAYS_FOR_FORM)
    assert config.algorithm.normalize == "batch_std" or not (pays or config.reward_rules)


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(CONFIGS.glob("*.yaml")) if _billions(_load(path)) >= 1.0],
    ids=lambda path: path.name,
)
def test_limits_fit_a_large_model(path: Path) -> None:
    config = _load(path)
    serve, rollout = config.serve, config.rollout
    size = 1
    if serve.mesh is not None:
        size = math.prod(max(n, 1) for n in (serve.mesh.data, serve.mesh.fsdp, serve.mesh.tensor))
    num_slots = serve.slots * DEVICES.get(path.stem, 1) // size
    assert num_slots >= rollout.tasks_per_step * rollout.group_size // 4
    assert rollout.concurrency >= min(num_slots, 256)
    agent = Path((config.agent.function or "").partition(":")[0]).stem
    num_targets = 0
    for option, (least, number) in REPLIES[agent].items():
        limit = config.agent.options[option]
        assert limit >= least and (rollout.max_tokens or limit) >= limit
        num_targets += number * limit
    assert config.batch.max_targets >= num_targets
    assert serve.max_len >= 2 * num_targets or serve.max_len >= 4096


def test_configs_of_large_models_are_found() -> None:
    found = {path.stem for path in CONFIGS.glob("*.yaml") if _billions(_load(path)) >= 1.0}
    assert found == {"calcx", "musique", "spider", *DEVICES}
