"""Models with adapters as training leaves them, and the policies that runs export of them."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp

from lightning_jax.models.config import LoraConfig
from lightning_jax.models.formats.load import LoadedModel
from lightning_jax.models.formats.param_names import flatten, unflatten
from lightning_jax.models.lora import ADAPTER_LEAVES, adapted
from lightning_jax.train.state.export import export

LORA = LoraConfig(rank=3, alpha=6.0)


def with_random_adapters(model: LoadedModel, lora: LoraConfig = LORA, seed: int = 5) -> LoadedModel:
    """Return the model with adapters whose B is not zero, as after some training."""
    model = adapted(model, lora, seed)
    keys = iter(jax.random.split(jax.random.key(seed), 99))
    change = {
        path: 0.3 * jax.random.normal(next(keys), leaf.shape) if path[-1] == "lora_b" else leaf
        for path, leaf in flatten(model.params).items()
    }
    return dataclasses.replace(model, params=unflatten(change))


def export_small_adapters(
    folder: Path, base: LoadedModel, lora: LoraConfig = LORA, name: str = ""
) -> LoadedModel:
    """Write a policy as a run does whose changes are small, and return it with its adapters."""
    model = with_random_adapters(base, lora)
    small = {
        path: leaf * 1e-3 if path[-1] == "lora_b" else leaf
        for path, leaf in flatten(model.params).items()
    }
    rounded = {
        path: leaf if path[-1] in ADAPTER_LEAVES else leaf.astype(jnp.bfloat16)
        for path, leaf in small.items()
    }
    model = dataclasses.replace(model, params=unflatten(rounded))
    export(folder, dataclasses.replace(model, name="base"), name, model.params, {})
    return model
