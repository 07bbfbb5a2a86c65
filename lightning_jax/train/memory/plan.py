"""Memory plan of a run: the bytes each device will hold, and whether they fit.

`make_plan` uses shapes alone. `compile_plan` also compiles the training step, for the devices here
or for simulated or absent ones (targets.py). It takes the step's memory from the compiler.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from lightning_jax.engine.replicas import split_by_data
from lightning_jax.models.formats.load import load_shape
from lightning_jax.models.lora import adapted_shape
from lightning_jax.models.memory import shares_frozen
from lightning_jax.models.precision import resolve_dtype
from lightning_jax.models.sharding import make_mesh, serving_mesh
from lightning_jax.models.transformer import DecoderConfig
from lightning_jax.settings import ConfigError
from lightning_jax.train.config import Config
from lightning_jax.train.memory.items import (
    MemoryItem,
    publish_items,
    serving_items,
    state_items,
    step_items,
)
from lightning_jax.train.memory.lowering import lower_step
from lightning_jax.train.updaters import phase_updater

GIB = 2**30


@dataclass(frozen=True)
class Plan:
    """Contents of one device's memory at its peak. `during` names the activity at that moment."""

    items: tuple[MemoryItem, ...]
    during: str
    devices: str
    capacity: int | None  # bytes of a device, or None if unknown

    @property
    def total(self) -> int:
        return sum(item.num_bytes for item in self.items)

    def __str__(self) -> str:
        return as_table(self)


def resolve_shape(config: Config, platform: str | None = None) -> tuple[Config, DecoderConfig]:
    """Return the settings with dtypes in place of auto, and the shape of the model they train.

    Dtypes are chosen for devices of `platform` (None: the devices here). The shape comes from the
    model's configuration alone. Raises ModelError.
    """
    config = replace(config, model=resolve_dtype(config.model, platform))
    shape = load_shape(config.model.name)
    shape = replace(shape, activation_dtype=config.model.activation_dtype)
    return config, adapted_shape(shape, config.model.lora, config.num_adapters)


def make_plan(
    model: DecoderConfig,
    config: Config,
    capacity: int | None = None,
    devices: Sequence[Any] | None = None,
) -> Plan:
    """Return the plan from shapes, for `devices` (default: all devices here).

    It is exact for arrays that are kept, and an estimate for the temporaries of a step.
    """
    training = make_mesh(config.mesh, devices)
    serving = serving_mesh(config.serve.mesh, config.mesh, devices)
    dtype = jnp.dtype(config.model.dtype)
    shares_base = shares_frozen(model, training, split_by_data(serving), dtype)
    trained = state_items(model, config, training, shares_base=shares_base)
    served = serving_items(model, config, serving, shares_base=shares_base)
    shared = not set(training.devices.flat).isdisjoint(serving.devices.flat)
    kept = trained + served if shared else trained
    cast, new = publish_items(model, config, training, serving)
    moments = {
        "an update": kept + step_items(model, config, training),
        "publishing": [*kept, cast, new] if shared else [*kept, cast],
    }
    if not shared:
        moments["publishing, on the serving devices"] = [*served, new]
    during, items = max(moments.items(), key=lambda item: sum(p.num_bytes for p in item[1]))
    sizes = " ".join(f"{axis}={size}" for axis, size in training.shape.items())
    kind = training.devices.flat[0].device_kind
    return Plan(tuple(items), during, f"{training.size} x {kind}, {sizes}", capacity)


def plan_run(config: Config) -> Plan:
    """Return the memory plan of a run on the devices here. `print` shows it as a table.

    Nothing is loaded or compiled. Raises ModelError or ConfigError for unusable settings.
    """
    config, model = resolve_shape(config)
    return make_plan(model, config, device_capacity())


def compile_plan(
    model: DecoderConfig,
    config: Config,
    capacity: int | None = None,
    devices: Sequence[Any] | None = None,
) -> Plan:
    """Return the plan with the compiler's figure for the temporaries of an update.

    Compiles, but allocates nothing.
    """
    # A value head is too small to count.
    algorithm = replace(config.algorithm, credit="identical", value_coef=0.0)
    config = replace(config, algorithm=algorithm)
    plan = make_plan(model, config, capacity, devices)
    if plan.during != "an update":
        return plan
    if devices is not None:  # JAX caches programs for absent devices but cannot load them
        jax.config.update("jax_enable_compilation_cache", False)
    updater = phase_updater(model, config, supervised=False, devices=devices)
    needed = max(
        lowered.compile().memory_analysis().temp_size_in_bytes
        for lowered in lower_step(updater, config)
    )
    _, *estimates, logits = step_items(model, config, updater.mesh)
    known = tuple(item for item in plan.items if item not in estimates)
    rest = max(needed - logits.num_bytes, 0)
    name, setting = "activations and other temporaries (compiled)", _largest(estimates).setting
    return replace(plan, items=(*known, MemoryItem(name, rest, setting)))


def check_plan(plan: Plan) -> None:
    """Raise ConfigError if a device is too small, with the setting that saves most."""
    if plan.capacity is None or plan.total <= plan.capacity:
        return
    most = _largest(plan.items)
    raise ConfigError(
        f"{plan.during} needs {_gib(plan.total)} per device, but a device has "
        f"{_gib(plan.capacity)}; the largest item is {most.name} with {_gib(most.num_bytes)}. "
        f"{most.setting}.",
        reason="too_large",
        key=most.name,
    )


def one_line(plan: Plan) -> str:
    """Format the plan as one log line."""
    items = ", ".join(f"{item.name} {item.num_bytes / GIB:.2f}" for item in plan.items)
    of = "" if plan.capacity is None else f" of {_gib(plan.capacity)}"
    return f"planned memory per device: {_gib(plan.total)}{of} ({items}) on {plan.devices}"


def as_table(plan: Plan) -> str:
    """Format the plan as lines, largest item first."""
    ordered = sorted(plan.items, key=lambda item: -item.num_bytes)
    lines = [f"{item.num_bytes / GIB:10.3f} GiB  {item.name}" for item in ordered]
    lines = [f"per device of {plan.devices}, during {plan.during}:", *lines]
    lines.append(f"{plan.total / GIB:10.3f} GiB  total")
    if plan.capacity is not None:
        lines.append(f"{plan.capacity / GIB:10.3f} GiB  capacity of a device")
    return "\n".join(lines)


def device_capacity() -> int | None:
    """Return the bytes of one device that arrays may take, or None if unknown.

    CPU devices share the host's memory.
    """
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // jax.local_device_count()
    return (device.memory_stats() or {}).get("bytes_limit")


def simulate_devices(number: int) -> None:
    """Replace this process's devices by `number` simulated ones.

    Raises ConfigError if JAX is already in use.
    """
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", number)
    except RuntimeError as error:
        raise ConfigError(
            f"{number} devices cannot be simulated: {error}", reason="conflict", key="devices"
        ) from error


def _largest(items: Sequence[MemoryItem]) -> MemoryItem:
    return max(items, key=lambda item: item.num_bytes)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
