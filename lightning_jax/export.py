"""What a run leaves for others: each of its policies as a model that other programs load."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from lightning_jax.models import peft_format
from lightning_jax.models.load import LoadedModel, save_hf, whole_directory
from lightning_jax.models.lora import merged, one_of
from lightning_jax.models.transformer import Params

EXPORTED = "policy.json"  # the step whose weights `policy` holds; while it is written, none


def export(
    directory: Path, model: LoadedModel, policy: str, params: Params, adapters: Mapping[str, int]
) -> None:
    """Writes `params`, the weights of `policy` ("": of all policies), below `directory`: as a
    Hugging Face model in `policy`, into which adapters are merged, and those again in `peft`'s form
    in `policy_adapter`. Of several policies each has a folder of its name in both. `adapters` are
    the places of those that are adapters.
    """
    model = replace(model, params=params)
    for name, place in adapters.items():
        _write(directory, one_of(model, place), name)
    if not adapters:
        _write(directory, model, policy)


def _write(directory: Path, model: LoadedModel, name: str) -> None:
    save_hf(directory / "policy" / name, merged(model))
    if model.config.lora is not None:
        with whole_directory(directory / "policy_adapter" / name) as draft:
            peft_format.write(draft, model.config.lora, model.params, model.name)
