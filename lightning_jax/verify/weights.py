"""Where the weights of a run's versions can be had.

Version s of the weights is what s trainer steps made. Those of 0 (the initial model), of the kept
checkpoints and of the exported policy can be had again.
"""

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lightning_jax.checkpoint import Checkpointer
from lightning_jax.config import Config
from lightning_jax.export import EXPORTED
from lightning_jax.models.load import load_model
from lightning_jax.models.lora import overlay, trained_part
from lightning_jax.models.transformer import Params


@dataclass(frozen=True)
class Source:
    """Where one version of the weights can be had."""

    label: str
    load: Callable[[Params], Params]  # what comes out is shaped and placed like what goes in


def find_sources(
    run_dir: Path, config: Config, last_version: int, policy: str = ""
) -> dict[int, Source]:
    """The versions that the run directory still holds; what they load from is given the weights of
    `config.model`. `policy` is one that has weights of its own.
    """
    label = f"{policy}: " if policy else ""
    base = config.policies[policy].base if policy else None
    if base in (None, config.model.name):
        sources = {0: Source(label + config.model.name, lambda initial: initial)}
    else:
        sources = {0: Source(label + base, _loads(base, config))}
    # Of several adapters each is merged apart: no one set of weights is all of them.
    exported = run_dir / "policy" / policy
    if _exported_step(run_dir) == last_version > 0 and not config.adapters and exported.is_dir():
        # A single adapter is merged there, and one over it is zero.
        name = f"{label}policy{f'/{policy}' if policy else ''}"
        sources[last_version] = Source(name, _loads(str(exported), config))
    directory = run_dir / "checkpoints"
    if directory.is_dir():

        def restore(initial: Params, step: int) -> Params:
            with contextlib.closing(Checkpointer(directory, config.checkpoint)) as checkpointer:
                trained = checkpointer.restore_params(trained_part(initial), step, policy)
                return overlay(initial, trained)

        with contextlib.closing(Checkpointer(directory, config.checkpoint)) as checkpointer:
            for step in checkpointer.steps:
                name = f"{label}checkpoints/{step}"
                sources[step] = Source(name, partial(restore, step=step))
    return sources


def _exported_step(run_dir: Path) -> int | None:
    try:
        return json.loads((run_dir / EXPORTED).read_text())["step"]
    except FileNotFoundError:
        return None


def _loads(name: str, config: Config) -> Callable[[Params], Params]:
    """What lays the named model's weights over those it is given."""
    return lambda initial: overlay(initial, load_model(name, config.model.dtype).params)
