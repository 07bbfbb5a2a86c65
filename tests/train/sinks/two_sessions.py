"""Write a run's metrics to one sink: steps 0 to 3, and after a resume steps 2 to 4.

python two_sessions.py RUN_DIR SINK SECRET
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_jax.settings import save_config
from lightning_jax.system.text import log_plainly
from lightning_jax.train.config import Config, MetricsConfig
from lightning_jax.train.directory import METRICS, SETTINGS
from lightning_jax.train.watch.metrics import MetricsLog

EVALUATION = {"eval/reward_mean": 0.5, "eval/reward_stderr": 0.25, "eval/num_tasks": 3}


def main(directory: Path, sink: Any, secret: str) -> None:
    log_plainly()
    metrics = MetricsConfig(sinks=["jsonl", sink], project="tests", name="mine")
    config = Config(run_dir=str(directory), num_steps=5, metrics=metrics)
    config = replace(config, serve=replace(config.serve, api_key=secret))
    save_config(config, directory / SETTINGS)
    for first, end in ((0, 4), (2, 5)):
        log = MetricsLog(directory / METRICS, first, metrics)
        for step in range(first, end):
            log.after_step(step, {"rollout/reward_mean": step / 4, "train/sink/agent=a": 1.0})
        if end == 5:
            log.after_step(5, EVALUATION)
        log.close("finished" if end == 5 else "stopped")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
