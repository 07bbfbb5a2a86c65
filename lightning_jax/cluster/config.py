"""Settings of processes that Ray places on machines."""

import re
from dataclasses import dataclass, field

from lightning_jax.schema import Natural, Positive, Section, require

LOCAL, AUTO = "local", "auto"  # addresses


@dataclass(frozen=True)
class ClusterConfig(Section):
    """Processes that Ray places, on this machine or others. They need the extra `ray`."""

    # auto: the cluster that this machine is part of; HOST:PORT: the cluster with this head; local:
    # a cluster of this machine alone, which ends with the run. None: no Ray.
    address: str | None = None
    # Samplers. Each serves the policy on the devices that it gets, and the trainer's devices only
    # train. 0: the trainer's process serves.
    samplers: Natural = 0
    # Ray's resources for a sampler: CPU, GPU, TPU, memory in bytes, or a name of your own. By
    # default a CPU.
    sampler_resources: dict[str, float] = field(default_factory=dict)
    # Environment variables of a sampler, as NAME=value.
    sampler_env: tuple[str, ...] = field(default=(), repr=False)
    # Workers, which run agents instead of the trainer's process.
    workers: Natural = 0
    # Ray's resources for a worker, by default a CPU.
    worker_resources: dict[str, float] = field(default_factory=dict)
    # Processes of the trainer: one on this machine, and others that Ray places. If one dies, all of
    # them start again from the newest checkpoint. 0: this process trains.
    trainers: Natural = 0
    # Ray's resources for each other process of the trainer, by default a CPU.
    trainer_resources: dict[str, float] = field(default_factory=dict)
    timeout_s: Positive = 300.0  # for the cluster to place and start what is asked for

    def __post_init__(self) -> None:
        for name in ("sampler_resources", "worker_resources", "trainer_resources"):
            numbers = {key: float(number) for key, number in getattr(self, name).items()}
            object.__setattr__(self, name, numbers)
        object.__setattr__(self, "sampler_env", tuple(self.sampler_env))
        super().__post_init__()
        is_known = self.address in (None, LOCAL, AUTO) or re.fullmatch(
            r"[^:/]+:\d+", self.address or ""
        )
        require(
            self,
            address=(bool(is_known), "auto, local, HOST:PORT or none"),
            trainers=(
                not self.trainers or self.address is not None,
                "0 without a cluster.address; set it to local, auto or HOST:PORT",
                "conflict",
            ),
            samplers=(
                (self.samplers + self.workers + self.trainers > 0) == (self.address is not None),
                "1 or more, or workers or trainers, with a cluster.address, and 0 without",
                "conflict",
            ),
            sampler_resources=(_are_positive(self.sampler_resources), "numbers above 0"),
            trainer_resources=(_are_positive(self.trainer_resources), "numbers above 0"),
            worker_resources=(_are_positive(self.worker_resources), "numbers above 0"),
            sampler_env=(
                all(re.fullmatch(r"\w+=.*", pair, re.DOTALL) for pair in self.sampler_env),
                "variables as NAME=value",
            ),
        )

    def resources(self, process: str) -> dict[str, float]:
        """Return what a "sampler", "worker" or "trainer" takes.

        The default is here, because settings are merged with the default of a field.
        """
        return getattr(self, f"{process}_resources") or {"CPU": 1.0}


def _are_positive(resources: dict[str, float]) -> bool:
    return all(number > 0 for number in resources.values())
