"""Memory that a run on CPUs holds beside its arrays, because process and devices share it."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.engine.replicas import split_by_data
from lightning_jax.models.config import MeshConfig
from lightning_jax.models.lora import trained_part
from lightning_jax.models.memory import turns_kernels, weight_bytes
from lightning_jax.models.mesh import make_mesh, serving_mesh
from lightning_jax.models.shape import DecoderConfig
from lightning_jax.train.config import Config
from lightning_jax.train.memory.items import MemoryItem, named_bytes

# Measured with SmolLM2-135M on 2 cores of an AMD EPYC, 25 November 2026 (benchmarks/LOG.md): what a
# process holds beside its weights when it has loaded them (0.36 to 0.46 GiB), and what is left of
# eight compiled programs of 30 layers (0.5 to 0.7 GiB).
PROCESS = int(0.4 * 2**30)
PROGRAM_LAYER = 3 * 2**20  # code and traces of one layer of one program
COMPILER_LAYER = 14 * 2**20  # left by LLVM until the heap is trimmed: 0.4 GiB for 30 layers

_NO_SETTING = "Give the process more memory"


def process_items(model: DecoderConfig, config: Config) -> list[MemoryItem]:
    """Return the memory of this process that is not in arrays, shared by its devices."""
    devices = jax.local_device_count()
    number = 2 * ((config.num_steps > 0) + (config.warmup.num_steps > 0))  # gradients, update
    if not config.cluster.samplers:  # else they compile what serves
        engine = split_by_data(serving_mesh(config.serve.mesh, config.mesh))[0]
        number += _count_served(model, config.serve, config.model.dtype, engine)
    programs = number * model.shape.num_layers * PROGRAM_LAYER
    fewer = f"Lower serve.slots={config.serve.slots} or serve.max_len={config.serve.max_len}"
    items = [
        MemoryItem("Python, JAX and libraries", PROCESS // devices, _NO_SETTING),
        MemoryItem(f"{number} compiled programs", programs // devices, fewer),
    ]
    if named := named_bytes(
        config.distill, config.rollout, config.batch
    ):  # in the sequences, and in batches before they are sharded
        lower = f"Lower distill.top_k={config.distill.num_top}, or set distill.kl to sampled"
        items.append(MemoryItem("copies of the teacher's tokens", 2 * named // devices, lower))
    algorithm = config.algorithm
    if config.warmup.num_steps or algorithm.has_critic or algorithm.has_reference:
        # CompileAhead leaves this to the update.
        leftover = model.shape.num_layers * COMPILER_LAYER // devices
        items.append(MemoryItem("compilation of an update", leftover, _NO_SETTING))
    return items


def transposed_item(model: DecoderConfig, dtype: jnp.dtype, serving: Mesh) -> MemoryItem:
    """Return the copy of new weights from which an engine on one CPU makes transposed kernels."""
    serving = split_by_data(serving)[0]
    turns = turns_kernels(serving, dtype)
    size = weight_bytes(model, serving, dtype, trained_part) if turns else 0
    return MemoryItem("new weights before they are transposed", size, _NO_SETTING)


def sent_item(model: DecoderConfig, dtype: jnp.dtype) -> MemoryItem:
    """Return the copies of new weights in this process and in Ray's object store."""
    whole = make_mesh(MeshConfig(data=1, fsdp=1, tensor=1))
    size = 2 * weight_bytes(model, whole, dtype, trained_part)
    size //= jax.local_device_count()
    return MemoryItem("new weights on their way to the samplers", size, _NO_SETTING)


def checkpoint_item(states: Sequence[MemoryItem]) -> MemoryItem:
    """Return the copies that the writer of a checkpoint makes of weights and moments."""
    written = ("weights in float32", "optimizer moments")
    size = sum(item.num_bytes for item in states if item.name.startswith(written))
    return MemoryItem("copies for the checkpoint", size, _NO_SETTING)


def _count_served(model: DecoderConfig, serve: ServeConfig, dtype: str, mesh: Mesh) -> int:
    """Return the number of programs of an engine with all layers that are likely to be compiled.

    These are a prefill for each bucket, and each size of a decode step.
    """
    programs = SlotPrograms(model, serve, dtype=dtype, mesh=mesh)
    return len(programs.buckets) + len(programs.capacities) * len(programs.slot_counts)
