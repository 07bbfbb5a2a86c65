"""Memory plan of a run: the bytes each device will hold, and whether they fit.

`make_plan` uses shapes alone. `compile_plan` also compiles the training step, for the devices here
or for simulated or absent ones (targets.py). It takes the step's memory from the compiler.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from lightning_jax.engine.replicas import split_by_data
from lightning_jax.models.config import AUTO, REMAT_KINDS, RematKind
from lightning_jax.models.formats.load import load_shape
from lightning_jax.models.lora import adapted_shape
from lightning_jax.models.memory import shares_frozen
from lightning_jax.models.mesh import make_mesh, serving_mesh
from lightning_jax.models.precision import resolve_dtype
from lightning_jax.models.shape import DecoderConfig, Execution
from lightning_jax.settings import ConfigError
from lightning_jax.system.memory import Limit, smallest_limit
from lightning_jax.train.config import Config
from lightning_jax.train.memory.host import (
    checkpoint_item,
    process_items,
    sent_item,
    transposed_item,
)
from lightning_jax.train.memory.items import (
    MemoryItem,
    named_items,
    publish_items,
    serving_items,
    state_items,
    step_items,
)
from lightning_jax.train.memory.lowering import lower_step
from lightning_jax.train.state.updaters import phase_updater

log = logging.getLogger(__name__)

GIB = 2**30
TIGHT = 0.9  # of what is allowed; above it a run is warned


@dataclass(frozen=True)
class Plan:
    """Contents of one device's memory at its peak. `during` names the activity at that moment."""

    items: tuple[MemoryItem, ...]
    during: str
    devices: str
    capacity: int | None  # bytes of a device, or None if unknown
    limit: Limit | None = None  # of this process, if the devices are its CPUs
    remat: RematKind = "none"  # what the update recomputes
    # If the plan chose `remat`: kinds that recompute less, each with the bytes that it would need.
    larger: tuple[tuple[RematKind, int], ...] = ()

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
    settings = config.model
    execution = Execution(
        activation_dtype=settings.activation_dtype, trains_router=settings.train_router
    )
    model = DecoderConfig(load_shape(settings.name), execution)
    return config, adapted_shape(model, settings.lora, config.policy_table.num_adapters)


def make_plan(
    model: DecoderConfig,
    config: Config,
    capacity: int | None = None,
    devices: Sequence[Any] | None = None,
    *,
    limit: Limit | None = None,
) -> Plan:
    """Return the plan from shapes, for `devices` (default: all devices here).

    It is exact for arrays that are kept, and an estimate for the temporaries of a step. With
    `model.remat: auto` it recomputes as little as fits in `TIGHT` of the capacity, or what needs
    least if nothing does. If the devices are this process's CPUs, `limit` is what the process may
    hold. The plan then includes what it holds beside the arrays, and `capacity` is by default a
    device's share of the limit.
    """
    here = process_items(model, config) if limit else []
    plan_limit = limit if capacity is None else None
    if plan_limit is not None:
        capacity = plan_limit.num_bytes // jax.local_device_count()
    training = make_mesh(config.mesh, devices)
    setting = config.model.remat
    kinds: tuple[RematKind, ...] = REMAT_KINDS if setting == AUTO else (setting,)
    peaks = [_peak(model, config, kind, devices, here) for kind in kinds]
    totals = [sum(item.num_bytes for item in items) for _, items in peaks]
    allowed = math.inf if capacity is None else max(TIGHT * capacity, min(totals))
    index = next(index for index, total in enumerate(totals) if total <= allowed)
    during, items = peaks[index]
    larger = tuple(zip(kinds[:index], totals[:index], strict=True))
    sizes = " ".join(f"{axis}={size}" for axis, size in training.shape.items())
    on = f"{training.size} x {training.devices.flat[0].device_kind}, {sizes}"
    return Plan(tuple(items), during, on, capacity, plan_limit, kinds[index], larger)


def _peak(
    model: DecoderConfig,
    config: Config,
    remat: RematKind,
    devices: Sequence[Any] | None,
    here: list[MemoryItem],
) -> tuple[str, list[MemoryItem]]:
    """Return the fullest of `_moments` if an update recomputes `remat`."""
    config = with_remat(config, remat)
    moments = _moments(model, config, make_mesh(config.mesh, devices), devices, here)
    return max(moments.items(), key=lambda item: sum(part.num_bytes for part in item[1]))


def with_remat(config: Config, remat: RematKind) -> Config:
    """Return the settings with the kind of recomputation that a plan chose."""
    return replace(config, model=replace(config.model, remat=remat))


def _moments(
    model: DecoderConfig,
    config: Config,
    training: Mesh,
    devices: Sequence[Any] | None,
    here: list[MemoryItem],
) -> dict[str, list[MemoryItem]]:
    """Return what a device holds in each part of a step that may be the peak.

    `here` is what a process holds beside the arrays, if the devices are its CPUs.
    """
    busiest, of_update = "rollouts", list[MemoryItem]()
    if config.total_steps:
        busiest = "an update"
        of_update = named_items(config.distill, config.rollout, config.batch, training)
        of_update += step_items(model, config.model, config.batch, training)
    dtype = jnp.dtype(config.model.dtype)
    if config.cluster.samplers:  # nothing serves here
        kept = state_items(model, config, training, shares_base=False)
        moments = {busiest: kept + of_update + here}
        if here:
            moments["publishing"] = [*kept, sent_item(model, dtype), *here]
            moments["a checkpoint"] = [*kept, *here, checkpoint_item(kept)]
        return moments
    serving = serving_mesh(config.serve.mesh, config.mesh, devices)
    shares_base = shares_frozen(model, training, split_by_data(serving), dtype)
    trained = state_items(model, config, training, shares_base=shares_base)
    served = serving_items(model, config, serving, shares_base=shares_base)
    shared = not set(training.devices.flat).isdisjoint(serving.devices.flat)
    kept = trained + served if shared else trained
    cast, new = publish_items(model, dtype, training, serving)
    moments = {
        busiest: kept + of_update + here,
        "publishing": [*kept, cast, *([new] if shared else []), *here],
    }
    if here:
        moments["publishing"].append(transposed_item(model, dtype, serving))
        moments["a checkpoint"] = [*kept, *here, checkpoint_item(trained)]
    if not shared:
        moments["publishing, on the serving devices"] = [*served, new, *here]
    return moments


def plan_run(config: Config) -> Plan:
    """Return the memory plan of a run on the devices here. `print` shows it as a table.

    Nothing is loaded or compiled. Raises ModelError or ConfigError for unusable settings.
    """
    config, model = resolve_shape(config)
    return make_plan(model, config, device_capacity(), limit=process_limit())


def compile_plan(
    model: DecoderConfig,
    config: Config,
    capacity: int | None = None,
    devices: Sequence[Any] | None = None,
    *,
    limit: Limit | None = None,
) -> Plan:
    """Return the plan with the compiler's figure for the temporaries of an update.

    Compiles, but allocates nothing.
    """
    # A value head is too small to count.
    algorithm = replace(config.algorithm, credit="identical", value_coef=0.0)
    config = replace(config, algorithm=algorithm)
    plan = make_plan(model, config, capacity, devices, limit=limit)
    config = with_remat(config, plan.remat)
    if plan.during != "an update":
        return plan
    if devices is not None:  # JAX caches programs for absent devices but cannot load them
        jax.config.update("jax_enable_compilation_cache", False)
    updater = phase_updater(model, config, supervised=False, devices=devices)
    # From JAX 0.11 on, a kernel for an absent GPU is lowered only under a mesh that names the GPU.
    with jax.sharding.use_abstract_mesh(updater.mesh.abstract_mesh):
        needed = max(
            lowered.compile().memory_analysis().temp_size_in_bytes
            for lowered in lower_step(
                *(updater, config.model.dtype, config.distill), has_kl=algorithm.kl_coef > 0
            )
        )
    _, *estimates, logits = step_items(model, config.model, config.batch, updater.mesh)
    others = tuple(item for item in plan.items if item not in estimates)
    rest = max(needed - logits.num_bytes, 0)
    name, setting = "activations and other temporaries (compiled)", _largest(estimates).setting
    return replace(plan, items=(*others, MemoryItem(name, rest, setting)))


def check_plan(plan: Plan) -> None:
    """Raise ConfigError if the plan does not fit, with the setting that saves most.

    Warn if it fits barely in what this process may hold, because a plan is an estimate.
    """
    if plan.capacity is None or (plan.limit is None and plan.total <= plan.capacity):
        return
    most = _largest(plan.items)
    allows = "a device has" if plan.limit is None else f"{plan.limit.name} allows"
    cure = most.setting if plan.limit is None else f"{most.setting}, or {plan.limit.fix}"
    needs = f"{plan.during} needs {_gib(plan.total)} per device, "
    largest = f"the largest item is {most.name} with {_gib(most.num_bytes)}. {cure}."
    if plan.total > plan.capacity:
        raise ConfigError(
            f"{needs}but {allows} {_gib(plan.capacity)}; {largest}",
            reason="too_large",
            key=most.name,
        )
    if plan.total > TIGHT * plan.capacity:
        log.warning(
            "%sand %s only %s; %s",
            *(needs, allows, _gib(plan.capacity), largest.rstrip(".")),
            extra={"event": "memory_tight", "needed": plan.total, "allowed": plan.capacity},
        )


def one_line(plan: Plan) -> str:
    """Format the plan as one log line."""
    items = ", ".join(f"{item.name} {item.num_bytes / GIB:.2f}" for item in plan.items)
    of = "" if plan.capacity is None else f" of {_gib(plan.capacity)}"
    return (
        f"planned memory per device: {_gib(plan.total)}{of} ({items}) on {plan.devices}; "
        f"{_recomputation(plan)}"
    )


def as_table(plan: Plan) -> str:
    """Format the plan as lines, largest item first."""
    ordered = sorted(plan.items, key=lambda item: -item.num_bytes)
    lines = [f"{item.num_bytes / GIB:10.3f} GiB  {item.name}" for item in ordered]
    lines = [f"per device of {plan.devices}, during {plan.during}:", *lines]
    lines.insert(1, f"           {_recomputation(plan)}")
    lines.append(f"{plan.total / GIB:10.3f} GiB  total")
    if plan.capacity is not None:
        lines.append(f"{plan.capacity / GIB:10.3f} GiB  capacity of a device")
    return "\n".join(lines)


def _recomputation(plan: Plan) -> str:
    """Say what an update recomputes and, if the plan chose it, why not less."""
    choice = f"model.remat={plan.remat}"
    if not plan.larger or plan.capacity is None:
        return choice
    needs = ", ".join(f"{kind} needs {_gib(total)}" for kind, total in plan.larger)
    return f"{choice}: of at most {_gib(int(TIGHT * plan.capacity))} ({TIGHT:.0%}), {needs}"


def device_capacity() -> int | None:
    """Return the bytes of one accelerator that arrays may take, or None if unknown or a CPU."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def process_limit() -> Limit | None:
    """Return the limit of this process's memory if its devices are CPUs, which share it."""
    return smallest_limit() if jax.local_devices()[0].platform == "cpu" else None


def simulate_devices(number: int) -> None:
    """Replace this process's devices by `number` simulated ones.

    Raises ConfigError if JAX is already in use.
    """
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", number)
    except RuntimeError as error:
        raise ConfigError.conflict(
            "devices", f"{number} devices cannot be simulated: {error}"
        ) from error


def _largest(items: Sequence[MemoryItem]) -> MemoryItem:
    return max(items, key=lambda item: item.num_bytes)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
