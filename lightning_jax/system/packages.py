"""Packages that are not always installed."""

import importlib
import re
import shlex
from types import ModuleType

from lightning_jax.errors import UserError


def import_optional(module: str, requirement: str) -> ModuleType:
    """Import a module of a package that is not always installed.

    `requirement` is what pip installs, such as verifiers>=0.4. Raises UserError if the package, or
    one that it imports, is missing.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(
            f"{error.name} is not installed; run pip install {shlex.quote(requirement)}.",
            reason="not_installed",
            key=re.split("[<>=]", requirement)[0],
        ) from error
