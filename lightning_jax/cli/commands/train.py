"""The commands `lightning-jax train` and `plan`. Nothing heavy is imported before they run."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from lightning_jax.cli.command import AtLeastOne, SettingsCommand, UsageError, flag
from lightning_jax.cli.runtime import stop_on_sigterm
from lightning_jax.settings.schema import Positive
from lightning_jax.system.process_state import kept_process

if TYPE_CHECKING:
    from lightning_jax.train.config import Config


@dataclass(frozen=True, kw_only=True)
class Train(SettingsCommand):
    """Train the agent that the settings name on the tasks of data.root or data.load.

    data.root is a file with one JSON object per line, or a directory with train.jsonl and
    dev.jsonl. data.load is FILE:FUNCTION. The exit code is 1 if no step changed the weights.
    """

    can_resume: ClassVar[bool] = True
    studio: bool = flag(
        "show the live page of `studio` at / of the run's server; the log has its URL and key",
        default=False,
    )

    def run(self) -> int:
        stop_on_sigterm()
        config = self.load_config()  # before imports, which a wrong key need not wait for
        from lightning_jax.train.loop.check import check_start

        check_start(config)
        if config.cluster.trainers:
            from lightning_jax.cli.train_in_cluster import train_in_cluster

            return train_in_cluster(config, self.layers(), has_page=self.studio)
        return train_on_tasks(config, has_page=self.studio)


def train_on_tasks(config: "Config", *, has_page: bool = False) -> int:
    """Load the tasks of checked settings, train on them, and return the exit code."""
    from lightning_jax.train.directory import with_fixed_paths
    from lightning_jax.train.tasks.data import load_tasks

    with kept_process():  # loaders and agents may change the directory
        fixed = with_fixed_paths(config)
        tasks = load_tasks(fixed)

        from lightning_jax.cli.train import train_and_report  # imports JAX, after the checks

        return train_and_report(fixed, *tasks, has_page=has_page, label=Path(config.run_dir))


@dataclass(frozen=True, kw_only=True)
class Plan(SettingsCommand):
    """Report how much memory a run needs on each device.

    Compiles the training step without allocating. The exit code is 1 if a device is too small.
    """

    devices: AtLeastOne | None = flag(
        "number of simulated devices (default: the devices of this machine)", "N"
    )
    target: str | None = flag(
        "plan for other hardware, such as h100:8 or v5e:2x4 (needs its compiler)", "NAME"
    )
    device_gib: Positive | None = flag(
        "memory of a device in GiB (default: as reported by this machine)", "GIB"
    )
    quick: bool = flag(
        "estimate a step's memory from shapes instead of compiling it", default=False
    )

    def run(self) -> int:
        from lightning_jax.train.loop.check import check_model

        if self.devices is not None and self.target is not None:
            raise UsageError.conflict(
                "--target", "--devices and --target are both set; choose one."
            )
        config = self.load_config()
        check_model(config)

        from lightning_jax.train.memory import plan  # imports JAX, after the checks
        from lightning_jax.train.memory.targets import target_devices

        capacity = devices = limit = None
        if self.target is not None:
            devices, capacity = target_devices(self.target)
        elif self.devices is not None:
            plan.simulate_devices(self.devices)
        else:
            capacity, limit = plan.device_capacity(), plan.process_limit()
        config, model = plan.resolve_shape(config, devices[0].platform if devices else None)
        if self.device_gib is not None:
            capacity = int(self.device_gib * plan.GIB)
        make = plan.make_plan if self.quick else plan.compile_plan
        report = make(model, config, capacity, devices, limit=limit)
        print(plan.as_table(report))
        plan.check_plan(report)
        return 0
