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
from jax.sharding import Mesh

from lightning_jax.engine.cache.pages import PageCopier
from lightning_jax.engine.cache.radix import PAGE
from lightning_jax.engine.replicas import split_by_data
from lightning_jax.models.attention.kv_cache import row_length
from lightning_jax.models.formats.load import load_shape
from lightning_jax.models.lora import adapted_shape, frozen_part, trained_part
from lightning_jax.models.memory import (
    activation_bytes,
    cache_bytes,
    logit_bytes,
    shares_frozen,
    spread_bytes,
    used_weight_bytes,
    weight_bytes,
)
from lightning_jax.models.precision import resolve_dtype
from lightning_jax.models.sharding import (
    cache_sharding,
    make_mesh,
    num_row_shards,
    platform_of,
    serving_mesh,
)
from lightning_jax.models.transformer import DecoderConfig
from lightning_jax.settings import ConfigError
from lightning_jax.train.config import Config
from lightning_jax.train.memory.lowering import lower_step
from lightning_jax.train.updaters import phase_updater

GIB = 2**30
_MORE_DEVICES = "Use more devices (mesh.fsdp) or a smaller model.name"
_SPLIT_SERVING = (
    "Split them over more devices (serve.mesh.tensor, or mesh.tensor without a serve.mesh)"
)


@dataclass(frozen=True)
class MemoryItem:
    """Memory of one device for one purpose. `setting` says how to reduce it."""

    name: str
    num_bytes: int
    setting: str


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


def plan_run(config: Config) -> Plan:
    """Return the memory plan of a run on the devices here. `print` shows it as a table.

    Nothing is loaded or compiled. Raises ModelError or ConfigError for unusable settings.
    """
    config, model = resolve_shape(config)
    return make_plan(model, config, device_capacity())


def make_plan(
    model: DecoderConfig,
    config: Config,
    capacity: int | None = None,
    devices: Sequence[Any] | None = None,
) -> Plan:
    """Return the plan from shapes, for `devices` (default: all devices here).

    It is exact for arrays that are kept, and an estimate for the temporaries of a step.
    """
    training, serving = (
        make_mesh(config.mesh, devices),
        serving_mesh(config.serve.mesh, config.mesh, devices),
    )
    shares_base = shares_frozen(
        model, training, split_by_data(serving), jnp.dtype(config.model.dtype)
    )
    trained = _state_items(model, config, training, shares_base=shares_base)
    served = _serving_items(model, config, serving, shares_base=shares_base)
    shared = not set(training.devices.flat).isdisjoint(serving.devices.flat)
    kept = trained + served if shared else trained
    cast, new = _publish_items(model, config, training, serving)
    moments = {
        "an update": kept + _step_items(model, config, training),
        "publishing": [*kept, cast, new] if shared else [*kept, cast],
    }
    if not shared:
        moments["publishing, on the serving devices"] = [*served, new]
    during, items = max(moments.items(), key=lambda item: sum(p.num_bytes for p in item[1]))
    sizes = " ".join(f"{axis}={size}" for axis, size in training.shape.items())
    kind = training.devices.flat[0].device_kind
    return Plan(tuple(items), during, f"{training.size} x {kind}, {sizes}", capacity)


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
    _, *estimates, logits = _step_items(model, config, updater.mesh)
    known = tuple(item for item in plan.items if item not in estimates)
    rest = max(needed - logits.num_bytes, 0)
    compiled = MemoryItem(
        "activations and other temporaries (compiled)", rest, _largest(estimates).setting
    )
    return replace(plan, items=(*known, compiled))


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


def _state_items(
    model: DecoderConfig, config: Config, mesh: Mesh, *, shares_base: bool
) -> list[MemoryItem]:
    weights = weight_bytes(model, mesh, jnp.float32, trained_part)
    optimizers = [config.optimizer, config.warmup.optimizer][: 1 + (config.warmup.num_steps > 0)]
    first = max(
        weight_bytes(model, mesh, jnp.dtype(optimizer.mu_dtype), trained_part)
        for optimizer in optimizers
    )
    half = ", or set optimizer.mu_dtype to bfloat16" if first == weights else ""
    number, num_trained = len(config.weights), len(config.trained_weights)
    num_moments = number if config.warmup.num_steps else num_trained
    items = [
        _times(number, MemoryItem("weights in float32", weights, _MORE_DEVICES)),
        _times(num_moments, MemoryItem("optimizer moments", weights + first, _MORE_DEVICES + half)),
    ]
    if frozen := weight_bytes(model, mesh, jnp.dtype(config.model.dtype), frozen_part):
        name = (
            "frozen weights, shared with serving" if shares_base else "frozen weights for training"
        )
        items.append(MemoryItem(name, frozen, _MORE_DEVICES))
    if config.algorithm.has_reference:
        is_dpo = config.algorithm.loss == "dpo"
        without = "Set algorithm.loss to clip" if is_dpo else "Set algorithm.kl_coef to 0"
        reference = MemoryItem("reference policy", weights, without)
        items.append(_times(num_trained, reference))
    return items


def _times(number: int, item: MemoryItem) -> MemoryItem:
    """Return the item multiplied by `number`, the policies with their own weights."""
    if number == 1:
        return item
    return replace(
        item, name=f"{item.name}, of {number} policies", num_bytes=number * item.num_bytes
    )


def _serving_items(
    model: DecoderConfig, config: Config, mesh: Mesh, *, shares_base: bool
) -> list[MemoryItem]:
    serve, dtype = config.serve, jnp.dtype(config.model.dtype)
    sharding = cache_sharding(model, mesh)
    length = row_length(serve.max_len, platform_of(sharding))
    pages = PageCopier(model, serve, dtype, sharding).num_pages * cache_bytes(
        model, 1, PAGE, sharding, dtype
    )
    whole = weight_bytes(model, mesh, dtype)
    items = [
        MemoryItem(
            "serving weights",
            weight_bytes(model, mesh, dtype, trained_part) if shares_base else whole,
            _SPLIT_SERVING,
        ),
        MemoryItem(
            "KV cache of the slots",
            cache_bytes(model, serve.slots, length, sharding, dtype),
            f"Lower serve.slots={serve.slots} or serve.max_len={serve.max_len}",
        ),
        MemoryItem(
            "prefix cache",
            pages,
            f"Lower serve.prefix_cache_mib={serve.prefix_cache_mib:g}",
        ),
    ]
    initial = whole + sum(item.num_bytes for item in items[1:])
    items = [_times(len(config.weights), item) for item in items]
    frozen = [name for name, role in config.roles.items() if role.served_by == "initial"]
    if frozen:
        setting = f"Set roles.{frozen[0]}.served_by to policy"
        items.append(MemoryItem("initial weights and their KV cache", initial, setting))
    return items


def _step_items(model: DecoderConfig, config: Config, mesh: Mesh) -> list[MemoryItem]:
    """Return the memory that the gradients of one microbatch need.

    The first item also exists between microbatches.
    """
    batch, remat = config.batch, config.model.remat
    activation_dtype = jnp.dtype(config.model.activation_dtype or config.model.dtype)
    weights = weight_bytes(model, mesh, jnp.float32, trained_part)
    rows = -(-batch.rows // num_row_shards(mesh))
    return [
        MemoryItem("gradients", weights, _MORE_DEVICES),
        MemoryItem(
            "microbatch gradients and gathered weights",
            weights + used_weight_bytes(model, mesh, remat=remat, dtype=config.model.dtype),
            _cheaper_step(config),
        ),
        MemoryItem(
            "activations",
            rows
            * batch.row_len
            * activation_bytes(model, mesh, remat=remat, dtype=activation_dtype),
            _smaller_rows(config, rows),
        ),
        MemoryItem(
            "logits",
            # Logits of one chunk, their probabilities, and their gradient.
            3 * rows * batch.head_chunk * logit_bytes(model, mesh),
            f"Lower batch.head_chunk={batch.head_chunk}",
        ),
    ]


def _cheaper_step(config: Config) -> str:
    if not config.model.remat:
        return "Set model.remat to true"
    if config.model.dtype != "bfloat16":
        return "Set model.dtype to bfloat16"
    return _MORE_DEVICES


def _smaller_rows(config: Config, rows: int) -> str:
    if not config.model.remat:
        return "Set model.remat to true"
    if rows > 1:
        return f"Lower batch.rows={config.batch.rows}"
    return f"Lower batch.row_len={config.batch.row_len}"


def _publish_items(
    model: DecoderConfig, config: Config, training: Mesh, serving: Mesh
) -> tuple[MemoryItem, MemoryItem]:
    """Return the memory of weights in transit.

    These are the weights spread over the training devices, and new weights next to old ones on the
    serving devices. Engines use the spread weights directly if they are already on their devices.
    Sets of weights are transferred one at a time.
    """
    dtype = jnp.dtype(config.model.dtype)
    cast = spread_bytes(model, training, split_by_data(serving)[0], dtype)
    new = weight_bytes(model, serving, dtype, trained_part)
    return (
        MemoryItem("weights cast for serving", cast, "Use more devices (mesh.fsdp)"),
        MemoryItem("new serving weights beside the old", new, _SPLIT_SERVING),
    )


def _largest(items: Sequence[MemoryItem]) -> MemoryItem:
    return max(items, key=lambda item: item.num_bytes)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
