"""What a run will hold in the memory of each device, and whether it fits, before it starts.

`make_plan` works on shapes alone. `compile_plan` also compiles the training step for the devices
at hand, which may be simulated ones, and takes the compiler's word for what the step needs.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lightning_jax.config import Config, ConfigError
from lightning_jax.learner import Learner, make_learner
from lightning_jax.models.lora import frozen_part, pick, trained_part
from lightning_jax.models.sharding import (
    MESH_AXES,
    batch_sharding,
    cache_sharding,
    make_mesh,
    num_row_shards,
    param_shapes,
    param_shardings,
    serving_mesh,
)
from lightning_jax.models.transformer import DecoderConfig, init_cache
from lightning_jax.rl import train_step
from lightning_jax.rl.batching import make_batches
from lightning_jax.serve.pages import PageCopier
from lightning_jax.serve.radix import PAGE
from lightning_jax.types import TrainingSequence

GIB = 2**30
_MORE_DEVICES = "Use more devices (mesh.fsdp), or a smaller model.name"
_SPLIT_SERVING = (
    "Split them further (serve.mesh.tensor, or mesh.tensor where there is no serve.mesh)"
)


@dataclass(frozen=True)
class Part:
    """Memory of one device for one purpose. `setting` is what makes it smaller."""

    name: str
    num_bytes: int
    setting: str


@dataclass(frozen=True)
class Plan:
    """What one device holds at its fullest moment, `during` which it does what that says."""

    parts: tuple[Part, ...]
    during: str
    devices: str
    capacity: int | None  # bytes of a device, None where nobody knows

    @property
    def total(self) -> int:
        return sum(part.num_bytes for part in self.parts)


def make_plan(model: DecoderConfig, config: Config, capacity: int | None = None) -> Plan:
    """The plan from shapes: exact for what is kept, an estimate for what a step needs on top."""
    training, serving = make_mesh(config.mesh), serving_mesh(config)
    trained = _state_parts(model, config, training)
    served = _serving_parts(model, config, serving)
    shared = not set(training.devices.flat).isdisjoint(serving.devices.flat)
    kept = trained + served if shared else trained
    cast, new = _publish_parts(model, config, training, serving)
    moments = {
        "an update": kept + _step_parts(model, config, training),
        "publishing": [*kept, cast, new] if shared else [*kept, cast],
    }
    if not shared:
        moments["publishing, where it is served"] = [*served, new]
    during, parts = max(moments.items(), key=lambda item: sum(p.num_bytes for p in item[1]))
    sizes = " ".join(f"{axis}={size}" for axis, size in training.shape.items())
    kind = training.devices.flat[0].device_kind
    return Plan(tuple(parts), during, f"{training.size} x {kind}, {sizes}", capacity)


def compile_plan(model: DecoderConfig, config: Config, capacity: int | None = None) -> Plan:
    """The plan with the compiler's own figure for what an update needs beside the arrays it gets
    and gives back. Compiles; allocates nothing.
    """
    # A value head is too small to count.
    algorithm = replace(config.algorithm, credit="identical", value_coef=0.0)
    config = replace(config, algorithm=algorithm)
    plan = make_plan(model, config, capacity)
    if plan.during != "an update":
        return plan
    learner = make_learner(model, config, supervised=False)
    needed = max(
        lowered.compile().memory_analysis().temp_size_in_bytes
        for lowered in lower_step(learner, config)
    )
    _, *estimates, logits = _step_parts(model, config, learner.mesh)
    known = tuple(part for part in plan.parts if part not in estimates)
    rest = max(needed - logits.num_bytes, 0)
    compiled = Part("activations and all else, as compiled", rest, _largest(estimates).setting)
    return replace(plan, parts=(*known, compiled))


def check_plan(plan: Plan) -> None:
    """Raises ConfigError if a device is too small, with the setting that saves most."""
    if plan.capacity is None or plan.total <= plan.capacity:
        return
    most = _largest(plan.parts)
    raise ConfigError(
        f"{plan.during} needs {_gib(plan.total)} on each device and a device has "
        f"{_gib(plan.capacity)}; most of it, {_gib(most.num_bytes)}, are {most.name}. "
        f"{most.setting}."
    )


def one_line(plan: Plan) -> str:
    """The plan as a line of a log."""
    parts = ", ".join(f"{part.name} {part.num_bytes / GIB:.2f}" for part in plan.parts)
    of = "" if plan.capacity is None else f" of {_gib(plan.capacity)}"
    return f"memory of a device (planned): {_gib(plan.total)}{of} ({parts}) on {plan.devices}"


def as_table(plan: Plan) -> str:
    """The plan as lines, largest part first."""
    ordered = sorted(plan.parts, key=lambda part: -part.num_bytes)
    lines = [f"{part.num_bytes / GIB:10.3f} GiB  {part.name}" for part in ordered]
    lines = [f"on each of {plan.devices}, during {plan.during}:", *lines]
    lines.append(f"{plan.total / GIB:10.3f} GiB  together")
    if plan.capacity is not None:
        lines.append(f"{plan.capacity / GIB:10.3f} GiB  what a device has")
    return "\n".join(lines)


def device_capacity() -> int | None:
    """Bytes of one device that arrays may take. CPU devices share the host's memory."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // jax.local_device_count()
    return (device.memory_stats() or {}).get("bytes_limit")


def simulate_devices(number: int) -> None:
    """Makes this process's devices `number` simulated ones. Raises ConfigError if JAX is in use."""
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", number)
    except RuntimeError as error:
        raise ConfigError(f"{number} devices cannot be simulated: {error}") from error


def lower_step(learner: Learner, config: Config) -> tuple[Any, Any]:
    """The programs of an update, lowered from shapes alone: gradients of a bundle of
    microbatches, and the optimizer's step.
    """
    functions: Any = learner.functions
    whole = NamedSharding(learner.mesh, PartitionSpec())
    everything = param_shardings(learner.model, learner.mesh)
    shapes = param_shapes(learner.model)
    places, base = trained_part(everything), frozen_part(shapes)
    params = jax.tree.map(_abstract, trained_part(shapes), places)
    if base is not None:
        dtype = jnp.dtype(config.model.dtype)
        base = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=place),
            base,
            pick(everything, base),
        )
    make_state = jax.eval_shape(learner.optimizer.init, params)
    moments = optax.tree.map_params(
        learner.optimizer,
        lambda leaf, place: _abstract(leaf, place),
        make_state,
        places,
        transform_non_params=lambda leaf: _abstract(leaf, whole),
    )
    state = train_step.TrainState(_scalar(jnp.int32, whole), params, moments)
    several = learner.several
    (batch,), _ = make_batches([_smallest_sequence(None if several is None else 0)], config.batch)
    batch = jax.tree.map(lambda leaf: _abstract(leaf, batch_sharding(learner.mesh)), batch)
    bundle, count = train_step.bundle([batch])
    reference = params if config.algorithm.kl_coef > 0 else None
    names = train_step.metric_names(functions.objective, None, reference is not None)
    sums = {name: _scalar(jnp.float32, whole) for name in names}
    grads = (params, None)
    present = () if several is None else (np.ones(several.number, bool),)
    return (
        functions.grads_fn.lower(params, grads, sums, bundle, count, reference, None, base),
        functions.apply_fn.lower(state, grads, *present),
    )


def _smallest_sequence(adapter: int | None) -> TrainingSequence:
    return TrainingSequence((1,), (1,), (0.0,), 1.0, 1.0, adapter=adapter)


def _abstract(leaf: Any, place: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)


def _scalar(dtype: Any, place: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), dtype, sharding=place)


def _state_parts(model: DecoderConfig, config: Config, mesh: Mesh) -> list[Part]:
    weights = _weight_bytes(model, mesh, jnp.float32, trained_part)
    optimizers = [config.optimizer, config.warmup.optimizer][: 1 + (config.warmup.num_steps > 0)]
    first = max(
        _weight_bytes(model, mesh, jnp.dtype(each.mu_dtype), trained_part) for each in optimizers
    )
    half = ", or set optimizer.mu_dtype to bfloat16" if first == weights else ""
    parts = [
        Part("weights in float32", weights, _MORE_DEVICES),
        Part("optimizer moments", weights + first, _MORE_DEVICES + half),
    ]
    if frozen := _weight_bytes(model, mesh, jnp.dtype(config.model.dtype), frozen_part):
        parts.append(Part("frozen weights", frozen, _MORE_DEVICES))
    if config.algorithm.kl_coef > 0:
        parts.append(Part("reference policy", weights, "Set algorithm.kl_coef to 0"))
    return parts


def _serving_parts(model: DecoderConfig, config: Config, mesh: Mesh) -> list[Part]:
    serve, dtype = config.serve, jnp.dtype(config.model.dtype)
    place = cache_sharding(model, mesh)
    pages = PageCopier(model, serve, dtype, place).num_pages * _cache_bytes(
        model, 1, PAGE, place, dtype
    )
    parts = [
        Part(
            "weights that serve",
            _weight_bytes(model, mesh, dtype),
            _SPLIT_SERVING,
        ),
        Part(
            "keys and values of slots",
            _cache_bytes(model, serve.slots, serve.max_len, place, dtype),
            f"Lower serve.slots={serve.slots} or serve.max_len={serve.max_len}",
        ),
        Part(
            "prefix cache",
            pages,
            f"Lower serve.prefix_cache_mib={serve.prefix_cache_mib:g}",
        ),
    ]
    frozen = [name for name, role in config.roles.items() if role.served_by == "initial"]
    if frozen:
        total = sum(part.num_bytes for part in parts)
        setting = f"Set roles.{frozen[0]}.served_by to policy"
        parts.append(Part("initial weights and their keys and values", total, setting))
    return parts


def _step_parts(model: DecoderConfig, config: Config, mesh: Mesh) -> list[Part]:
    """What the gradients of one microbatch need; the first is there between microbatches too."""
    batch, dtype = config.batch, jnp.dtype(config.model.dtype)
    weights = _weight_bytes(model, mesh, jnp.float32, trained_part)
    rows = -(-batch.rows // num_row_shards(mesh))
    return [
        Part("gradients", weights, _MORE_DEVICES),
        Part(
            "gradients of a microbatch and weights as used",
            weights + _used_weight_bytes(model, config, mesh),
            _cheaper_step(config),
        ),
        Part(
            "activations",
            rows
            * batch.row_len
            * _activation_bytes(model, mesh, remat=config.model.remat, dtype=dtype),
            _smaller_rows(config, rows),
        ),
        Part(
            "logits",
            # Those of one chunk, the same as probabilities, and their gradient.
            3
            * rows
            * batch.head_chunk
            * 4
            * model.vocab_size
            // _split("vocab", model.vocab_size, mesh),
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


def _publish_parts(
    model: DecoderConfig, config: Config, training: Mesh, serving: Mesh
) -> tuple[Part, Part]:
    """The weights on their way: cast where they were trained, new beside old where they serve."""
    dtype = jnp.dtype(config.model.dtype)
    cast = 0 if dtype == jnp.float32 else _weight_bytes(model, training, dtype, trained_part)
    return (
        Part("weights cast for serving", cast, "Use more devices (mesh.fsdp)"),
        Part(
            "new weights beside the old",
            _weight_bytes(model, serving, dtype, trained_part),
            _SPLIT_SERVING,
        ),
    )


def _weight_bytes(
    model: DecoderConfig, mesh: Mesh, dtype: Any, part: Callable[[Any], Any] = lambda tree: tree
) -> int:
    """Of all weights, or a part of them, what one device holds."""
    shapes = jax.tree.leaves(part(param_shapes(model)))
    places = jax.tree.leaves(part(param_shardings(model, mesh)))
    sizes = (
        math.prod(place.shard_shape(leaf.shape)) for leaf, place in zip(shapes, places, strict=True)
    )
    return sum(sizes) * jnp.dtype(dtype).itemsize


def _used_weight_bytes(model: DecoderConfig, config: Config, mesh: Mesh) -> int:
    """The copy in the dtype of the computation, and what is gathered of it at once."""
    dtype = jnp.dtype(config.model.dtype)
    # With `remat` the layers are stacked. Else frozen weights are used as they lie.
    if config.model.remat:
        copy = _weight_bytes(model, mesh, dtype)
    else:
        copy = 0 if dtype == jnp.float32 else _weight_bytes(model, mesh, dtype, trained_part)
    if mesh.shape["fsdp"] == 1:
        return copy
    tensor_only = Mesh(
        mesh.devices.reshape(-1)[: mesh.shape["tensor"]].reshape(1, 1, -1), mesh.axis_names
    )
    whole = _weight_bytes(model, tensor_only, dtype)
    outside = (
        model.vocab_size
        * model.embed_dim
        * dtype.itemsize
        // _split("vocab", model.vocab_size, mesh)
    )
    outside *= 1 if model.tie_embeddings else 2
    # Their gradients are whole, too, until they are added up.
    at_once = outside + (whole - outside) // model.num_layers
    return copy + (2 * at_once if config.model.remat else whole + at_once)


def _activation_bytes(model: DecoderConfig, mesh: Mesh, *, remat: bool, dtype: Any) -> int:
    """Of one token. A layer keeps its input, two normed ones, queries, keys, values, the mixed
    values, and three arrays of the MLP; with `remat` only one layer does so at a time.
    """
    heads = model.num_heads * model.head_dim // _split("heads", model.num_heads, mesh)
    keys = model.num_kv_heads * model.head_dim // _split("kv_heads", model.num_kv_heads, mesh)
    mlp = model.mlp_dim // _split("mlp", model.mlp_dim, mesh)
    layer = 4 * model.embed_dim + 3 * heads + 3 * keys + 3 * mlp
    numbers = (
        model.num_layers * model.embed_dim + 2 * layer if remat else (model.num_layers + 1) * layer
    )
    return numbers * jnp.dtype(dtype).itemsize


def _cache_bytes(
    model: DecoderConfig, rows: int, length: int, place: NamedSharding, dtype: Any
) -> int:
    cache = jax.eval_shape(lambda: init_cache(model, rows, length, dtype))
    sizes = (math.prod(place.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(cache))
    return sum(sizes) * jnp.dtype(dtype).itemsize


def _split(axis: str, size: int, mesh: Mesh) -> int:
    """Into how many parts the mesh splits a logical axis."""
    parts = math.prod(mesh.shape[name] for name in MESH_AXES[axis])
    return parts if size % parts == 0 else 1


def _largest(parts: Sequence[Part]) -> Part:
    return max(parts, key=lambda part: part.num_bytes)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
