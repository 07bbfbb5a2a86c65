"""Settings of processes that Ray places on machines."""

import re
from collections.abc import Iterator
from dataclasses import field
from typing import Annotated

from lightning_jax.settings.schema import Natural, Positive, Rule, Section, expect, section

LOCAL, AUTO = "local", "auto"  # addresses
Address = Annotated[
    str, expect(re.compile(r"auto|local|[^:/]+:\d+").fullmatch, "auto, local, HOST:PORT or none")
]
_PAIR = re.compile(r"\w+=.*", re.DOTALL)
Variables = Annotated[
    tuple[str, ...],
    expect(lambda pairs: all(map(_PAIR.fullmatch, pairs)), "variables as NAME=value"),
]


@section
class ClusterConfig(Section):
    """Processes that Ray places, on this machine or others. They need the extra `ray`."""

    address: Address | None = None
    """auto: the cluster that this machine is part of; HOST:PORT: the cluster with this head; local:
    a cluster of this machine alone, which ends with the run. None: no Ray."""
    samplers: Natural = 0
    """Samplers. Each serves the policy on the devices that it gets, and the trainer's devices only
    train. 0: the trainer's process serves."""
    sampler_resources: dict[str, Positive] = field(default_factory=dict)
    """Ray's resources for a sampler: CPU, GPU, TPU, memory in bytes, or a name of your own. By
    default a CPU."""
    sampler_env: Variables = field(default=(), repr=False)
    """Environment variables of a sampler, as NAME=value."""
    workers: Natural = 0
    """Workers, which run agents instead of the trainer's process."""
    worker_resources: dict[str, Positive] = field(default_factory=dict)
    """Ray's resources for a worker, by default a CPU."""
    trainers: Natural = 0
    """Processes of the trainer: one on this machine, and others that Ray places. If one dies, all
    of them start again from the newest checkpoint. 0: this process trains."""
    trainer_resources: dict[str, Positive] = field(default_factory=dict)
    """Ray's resources for each other process of the trainer, by default a CPU."""
    timeout_s: Positive = 300.0
    """For the cluster to place and start what is asked for."""

    def rules(self) -> Iterator[Rule]:
        has_address = self.address is not None
        yield (
            "trainers",
            not self.trainers or has_address,
            "expected 0 without a cluster.address; set it to local, auto or HOST:PORT",
        )
        yield (
            "samplers",
            (self.samplers + self.workers + self.trainers > 0) == has_address,
            "expected 1 or more, or workers or trainers, with a cluster.address, and 0 without",
        )

    def resources(self, process: str) -> dict[str, float]:
        """Return what a "sampler", "worker" or "trainer" takes.

        The default is here, because settings are merged with the default of a field.
        """
        return getattr(self, f"{process}_resources") or {"CPU": 1.0}
