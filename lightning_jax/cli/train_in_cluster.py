"""A training run whose trainer's processes are placed in a cluster.

As a script, it is one of these processes: `lightning-jax`, which ends with the process that started
it. Its standard input is a socket, which closes when that process ends, however that happens.
"""

import asyncio
import os
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lightning_jax.cluster.ray_session import ray_session
from lightning_jax.cluster.trainers import Trainers
from lightning_jax.train.config import ClusterConfig, Config
from lightning_jax.train.directory import newest_checkpoint

SCRIPT = "lightning_jax.cli.train_in_cluster"
LOST = 1  # exit status of a process that has lost the one that started it


def train_in_cluster(config: Config, layers: Sequence[str], *, has_page: bool) -> int:
    """Train with the processes that `cluster.trainers` asks for, and return the exit code.

    `layers` are the files and settings of the command line. Raises ClusterError if processes of
    the trainer die again and again.
    """
    directory = Path(config.run_dir).resolve()
    words = partial(_words, config.cluster, tuple(layers), has_page)
    newest = partial(newest_checkpoint, directory)
    with ray_session(config.cluster) as ray:
        trainers = Trainers(ray, config.cluster, str(directory), words, newest)
        try:
            return asyncio.run(trainers.run())
        except asyncio.CancelledError:  # stopped before process 0 ran
            raise KeyboardInterrupt from None


def _words(
    cluster: ClusterConfig,
    layers: tuple[str, ...],
    has_page: bool,
    index: int,
    coordinator: str,
    address: str,
) -> list[str]:
    """Return the command line of one process."""
    settings = [
        *layers,
        "cluster.trainers=0",
        f"cluster.address={address if cluster.samplers + cluster.workers else 'null'}",
    ]
    if cluster.trainers > 1:
        settings += [
            "distributed.mode=manual",
            f"distributed.coordinator={coordinator}",
            f"distributed.num_processes={cluster.trainers}",
            f"distributed.process_id={index}",
        ]
    page = ["--studio"] if has_page and index == 0 else []
    return ["-m", SCRIPT, "train", *page, *settings]


def _exit_at_end_of_input() -> None:
    while os.read(0, 4096):
        pass
    os._exit(LOST)


if __name__ == "__main__":
    threading.Thread(target=_exit_at_end_of_input, daemon=True).start()
    from lightning_jax.cli.main import main

    sys.exit(main(sys.argv[1:]))
