"""Contents of a device's memory during a run: what is kept, and what a moment adds."""

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax.sharding import Mesh

from lightning_jax.engine.device.pages import PageCopier, page_bytes
from lightning_jax.engine.device.radix import PAGE
from lightning_jax.engine.replicas import split_by_data
from lightning_jax.models.attention.kv_cache import row_length
from lightning_jax.models.config import AUTO, ModelConfig
from lightning_jax.models.formats.load import load_shape
from lightning_jax.models.lora import frozen_part, trained_part
from lightning_jax.models.memory import (
    activation_bytes,
    cache_bytes,
    copy_bytes,
    logit_bytes,
    used_weight_bytes,
    weight_bytes,
)
from lightning_jax.models.mesh import num_row_shards, platform_of
from lightning_jax.models.policies import TEACHER
from lightning_jax.models.shape import DecoderConfig
from lightning_jax.models.sharding import cache_sharding
from lightning_jax.rl.config import BatchConfig, DistillConfig
from lightning_jax.rollouts.config import RolloutConfig
from lightning_jax.train.config import Config

_MORE_DEVICES = "Use more devices (mesh.fsdp) or a smaller model.name"
# For what grows with the trained weights, where all of them are trained.
_ADAPTERS = "Train adapters (model.lora.rank=32), use more devices (mesh.fsdp) or a smaller model"
_SPLIT_SERVING = (
    "Split them over more devices (serve.mesh.tensor, or mesh.tensor without a serve.mesh)"
)


@dataclass(frozen=True)
class MemoryItem:
    """Memory of one device for one purpose. `setting` says how to reduce it."""

    name: str
    num_bytes: int
    setting: str

    def times(self, number: int) -> "MemoryItem":
        """Return the item multiplied by `number`, the policies with their own weights."""
        if number == 1:
            return self
        name = f"{self.name}, of {number} policies"
        return replace(self, name=name, num_bytes=number * self.num_bytes)


def state_items(
    model: DecoderConfig, config: Config, mesh: Mesh, *, shares_base: bool
) -> list[MemoryItem]:
    """Return the memory of train states and their reference."""
    algorithm, warmup = config.algorithm, config.warmup
    weights = weight_bytes(model, mesh, jnp.float32, trained_part)
    less = _less_trained(config.model)
    optimizers = [config.optimizer, warmup.optimizer][: 1 + (warmup.num_steps > 0)]
    first = max(
        weight_bytes(model, mesh, jnp.dtype(optimizer.mu_dtype), trained_part)
        for optimizer in optimizers
    )
    half = ", or set optimizer.mu_dtype to bfloat16" if first == weights else ""
    moments = MemoryItem("optimizer moments", weights + first, less + half)
    policies = config.policy_table.sets
    number, num_trained = len(policies), sum(policy.trains for policy in policies)
    items = [MemoryItem("weights in float32", weights, less).times(number)]
    if config.total_steps:
        items.append(moments.times(number if warmup.num_steps else num_trained))
    if frozen := weight_bytes(model, mesh, jnp.dtype(config.model.dtype), frozen_part):
        use = ", shared with serving" if shares_base else " for training"
        items.append(MemoryItem(f"frozen weights{use}", frozen, _MORE_DEVICES))
    if algorithm.has_reference and config.total_steps:
        without = "algorithm.loss to clip" if algorithm.loss == "dpo" else "algorithm.kl_coef to 0"
        reference = MemoryItem("reference policy", weights, f"Set {without}")
        items.append(reference.times(num_trained))
    if (row := config.policy_table.row(TEACHER)) is not None:
        shape = DecoderConfig(load_shape(row.base or config.model.name))
        teacher = weight_bytes(shape, mesh, jnp.dtype(config.model.dtype))
        items.append(MemoryItem("teacher", teacher, "Set distill.teacher to a smaller model"))
    return items


def _less_trained(settings: ModelConfig) -> str:
    return _MORE_DEVICES if settings.lora.rank else _ADAPTERS


def serving_items(
    model: DecoderConfig, config: Config, mesh: Mesh, *, shares_base: bool
) -> list[MemoryItem]:
    """Return the memory of the engines."""
    serve, dtype = config.serve, jnp.dtype(config.model.dtype)
    sharding = cache_sharding(model.shape, mesh)
    platform = platform_of(sharding)
    length = row_length(serve.max_len, platform)
    slots = cache_bytes(model, serve.slots, length, sharding, dtype)
    num_pages = PageCopier(model.shape, serve, dtype, sharding).num_pages
    pages = num_pages * cache_bytes(model, 1, PAGE, sharding, dtype)
    whole = weight_bytes(model, mesh, dtype)
    weights = weight_bytes(model, mesh, dtype, trained_part) if shares_base else whole
    fewer = f"Lower serve.slots={serve.slots} or serve.max_len={serve.max_len}"
    mib = serve.prefix_cache_mib
    if mib is None:
        mib = round(num_pages * page_bytes(model.shape, dtype, platform) / 2**20)
    smaller = f"Lower serve.prefix_cache_mib={mib:g}"
    number = len(config.policy_table.sets)
    items = [
        MemoryItem("serving weights", weights, _SPLIT_SERVING).times(number),
        MemoryItem("KV cache of the slots", slots, fewer).times(number),
        MemoryItem("prefix cache", pages, smaller).times(number),
    ]
    if config.initial_users:
        is_role = config.initial_users[0].startswith("roles.")
        setting = f"Set {config.initial_users[0]} to {'policy' if is_role else 'a URL'}"
        name = "initial weights and their KV cache"
        items.append(MemoryItem(name, whole + slots + pages, setting))
    return items


def step_items(
    model: DecoderConfig, settings: ModelConfig, batch: BatchConfig, mesh: Mesh
) -> list[MemoryItem]:
    """Return the memory that the gradients of one microbatch need, with a resolved `remat`.

    The first item also exists between microbatches.
    """
    dtype, remat = settings.dtype, settings.remat
    assert remat != AUTO, "a plan chooses it"
    activation_dtype = jnp.dtype(settings.activation_dtype or dtype)
    weights = weight_bytes(model, mesh, jnp.float32, trained_part)
    rows = -(-batch.rows // num_row_shards(mesh))
    used = used_weight_bytes(model, mesh, remat=remat, dtype=dtype)
    token = activation_bytes(model, mesh, remat=remat, dtype=activation_dtype)
    # Logits of one chunk, their probabilities, and their gradient.
    chunk = batch.chunk_of(model.shape.vocab_size)
    logits = 3 * rows * chunk * logit_bytes(model, mesh)
    if remat == "full":
        cheaper = "Set model.dtype to bfloat16" if dtype != "bfloat16" else _MORE_DEVICES
        shorter = f"rows={batch.rows}" if rows > 1 else f"row_len={batch.row_len}"
        smaller = f"Lower batch.{shorter}"
    else:
        cheaper = smaller = "Set model.remat to full"
    return [
        MemoryItem("gradients", weights, _less_trained(settings)),
        MemoryItem("microbatch gradients and gathered weights", weights + used, cheaper),
        MemoryItem("activations", rows * batch.row_len * token, smaller),
        MemoryItem("logits", logits, f"Lower batch.head_chunk={chunk}"),
    ]


def named_bytes(distill: DistillConfig, rollout: RolloutConfig, batch: BatchConfig) -> int:
    """Return the size of the teacher's likeliest tokens at the targets of a step, 0 without any.

    Each rollout counts as a row of a batch, which is the most unless rollouts have several
    conversations. A token has an id and a log-probability.
    """
    rollouts = rollout.tasks_per_step * rollout.group_size
    named = distill.num_top if distill.has_teacher else 0
    return rollouts * batch.max_targets * named * (4 + 4)


def named_items(
    distill: DistillConfig, rollout: RolloutConfig, batch: BatchConfig, mesh: Mesh
) -> list[MemoryItem]:
    """Return the memory of a step's likeliest tokens by a teacher, if it names any."""
    share = named_bytes(distill, rollout, batch) // num_row_shards(mesh)
    lower = f"Lower distill.top_k={distill.num_top}, or set distill.kl to sampled"
    return [MemoryItem("the teacher's likeliest tokens", share, lower)] if share else []


def publish_items(
    model: DecoderConfig, dtype: jnp.dtype, training: Mesh, serving: Mesh
) -> tuple[MemoryItem, MemoryItem]:
    """Return the memory of weights in transit.

    These are the weights spread over the training devices, and new weights next to old ones on the
    serving devices. Engines use the copied weights directly if they are already on their devices.
    Sets of weights are transferred one at a time.
    """
    cast = copy_bytes(model, training, split_by_data(serving)[0], dtype)
    new = weight_bytes(model, serving, dtype, trained_part)
    return (
        MemoryItem("weights cast for serving", cast, "Use more devices (mesh.fsdp)"),
        MemoryItem("new serving weights beside the old", new, _SPLIT_SERVING),
    )
