"""Export of each trained policy as a Hugging Face directory."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from lightning_jax.models.formats.load import LoadedModel, save_hf, whole_directory
from lightning_jax.models.lora import merged, one_of, write_peft
from lightning_jax.models.model_files import ADAPTERS, MERGED
from lightning_jax.models.transformer import Params


def export(
    directory: Path, model: LoadedModel, policy: str, params: Params, adapters: Mapping[str, int]
) -> None:
    """Write the weights `params` of `policy` ("": of all policies) below `directory`.

    `policy` gets a Hugging Face model with adapters merged. `policy_adapter` gets the adapters in
    `peft`'s format. With several policies each has its own subdirectory in both. `adapters` maps
    the names of adapter policies to their index.
    """
    model = replace(model, params=params)
    for name, index in adapters.items():
        _write(directory, one_of(model, index), name)
    if not adapters:
        _write(directory, model, policy)


def _write(directory: Path, model: LoadedModel, name: str) -> None:
    save_hf(directory / MERGED / name, merged(model))
    if model.config.execution.lora is not None:
        with whole_directory(directory / ADAPTERS / name) as draft:
            write_peft(draft, model.config, model.params, model.name)
