"""Loop of a run. The room is callable, because `lightning_jax.train` is also its function."""

import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call `trainer.train`."""
        from lightning_jax.train.loop.trainer import train

        return train(*arguments, **options)


sys.modules[__name__].__class__ = _Room
