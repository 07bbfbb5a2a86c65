"""Settings from YAML files and the command line, checked and saved."""

from lightning_jax.settings.errors import ConfigError
from lightning_jax.settings.load import load_config, load_with_derived
from lightning_jax.settings.saved import changed_keys, flatten, read_saved, save_config
from lightning_jax.settings.schema import HIDDEN

__all__ = [
    "HIDDEN",
    "ConfigError",
    "changed_keys",
    "flatten",
    "load_config",
    "load_with_derived",
    "read_saved",
    "save_config",
]
