"""Access to the library tokamax, which the extra `tokamax` installs."""

import contextlib
import functools
import importlib
import logging
from collections.abc import Iterator

import jax

from lightning_jax.settings.loading import is_installed

log = logging.getLogger(__name__)


@functools.cache
def can_import(module: str, otherwise: str) -> bool:
    """Return whether a module of tokamax can be imported.

    Warn if tokamax is there and cannot. `otherwise` says what is used then.
    """
    if not is_installed("tokamax"):
        return False
    try:
        importlib.import_module(module)
    except (ImportError, AttributeError) as error:  # the second with another JAX or flax
        log.warning(
            "%s, because tokamax cannot be imported (%s); install the versions of the extra "
            "'lightning-jax[tokamax]'",
            otherwise,
            error,
        )
        return False
    return True


@contextlib.contextmanager
def conventions() -> Iterator[None]:
    """Let tokamax promote ranks and use its default block sizes within the block.

    It would log a warning for each shape for which it has no measured sizes.
    """
    settings = importlib.import_module("tokamax.config")
    with settings.ignore_autotuning_cache(True), jax.numpy_rank_promotion("allow"):
        yield
