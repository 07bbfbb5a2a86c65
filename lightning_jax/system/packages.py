"""Packages that are not always installed."""

import importlib
import importlib.util
import re
import shlex
import sys
from types import ModuleType

from lightning_jax.errors import UserError


def is_installed(module: str) -> bool:
    """Return whether a top-level module can be imported, without importing it.

    A folder of its name, such as the ./wandb that a run of W&B leaves, is not the package.
    """
    if module in sys.modules:
        return True
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None


def import_optional(module: str, requirement: str) -> ModuleType:
    """Import a module of a package that is not always installed.

    `requirement` is what pip installs, such as verifiers>=0.4. Raises UserError if the package, or
    one that it imports, is missing.
    """
    top = module.partition(".")[0]
    try:
        if not is_installed(top):
            raise ModuleNotFoundError(name=top)
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(
            f"{error.name} is not installed; run pip install {shlex.quote(requirement)}.",
            reason="not_installed",
            key=re.split("[<>=]", requirement)[0],
        ) from error
