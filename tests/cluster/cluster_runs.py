"""Settings of small runs over the simulated cluster."""

from pathlib import Path
from typing import Any

from toy_runs import MODEL, toy_config

from lightning_jax.models.formats.load import save_hf
from lightning_jax.rl.config import OptimizerConfig
from lightning_jax.rollouts.config import RolloutConfig
from lightning_jax.train.config import ClusterConfig, Config

SAMPLER = {"sampler": 1.0}  # a resource of the second and the third node, see simulated_nodes.py


def settings(ray_cluster: Any, folder: Path, **changes: Any) -> Config:
    model = folder / "tiny"
    if not model.exists():
        save_hf(model, MODEL)
    usual: dict[str, Any] = {
        "num_steps": 6,
        "rollout": RolloutConfig(tasks_per_step=4, group_size=8, concurrency=32, retry_delay_s=0.1),
        "optimizer": OptimizerConfig(learning_rate=5e-2),
        "cluster": ClusterConfig(ray_cluster.address, samplers=2, sampler_resources=SAMPLER),
    }
    return toy_config(model, folder / "run", **usual | changes)
