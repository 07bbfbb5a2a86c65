"""Settings saved in a run's directory, and their comparison with others."""

import os
from pathlib import Path
from typing import Any

from yaml import YAMLError

from lightning_jax.settings.errors import ConfigError, is_secret, one_sentence
from lightning_jax.settings.paths import map_paths
from lightning_jax.settings.schema import HIDDEN, SECRET, plain
from lightning_jax.system.files import write_whole


def save_config(config: Any, path: Path) -> None:
    """Write the resolved settings as YAML, with HIDDEN in place of secrets.

    A function is written as MODULE:FUNCTION. Paths are absolute, so that the file can be read from
    anywhere.
    """
    from omegaconf import OmegaConf

    write_whole(path, OmegaConf.to_yaml(OmegaConf.create(_as_saved(config))))


def read_saved(path: Path) -> dict[str, Any]:
    """Return the settings that `save_config` wrote. Raises ConfigError for a damaged file."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        saved = OmegaConf.to_container(OmegaConf.load(path))
        if not saved or not isinstance(saved, dict):
            raise ValueError("it holds no settings")
    except (YAMLError, OSError, ValueError, RecursionError, OmegaConfBaseException) as error:
        raise ConfigError.malformed(
            str(path),
            f"{path} is damaged ({one_sentence(error)}); delete it to continue with the current "
            "settings, or set another run_dir.",
        ) from error
    return {str(name): value for name, value in saved.items()}


def changed_keys(path: Path, config: Any) -> list[str]:
    """Return the dotted keys in which `config` differs from the settings saved at `path`.

    Secrets are not compared. A key missing in the file counts as its default, so a new setting does
    not change old runs. Raises ConfigError for a damaged file.
    """
    if not path.exists():
        return []
    saved = map_paths(read_saved(path), type(config), os.path.abspath)
    old, new = flatten(_as_saved(type(config)())) | flatten(saved), flatten(_as_saved(config))
    keys = (key for key in old.keys() | new.keys() if not is_secret(key))
    return sorted(key for key in keys if old.get(key) != new.get(key))


def _as_saved(config: Any) -> dict[str, Any]:
    return map_paths(_hide(plain(config)), type(config), os.path.abspath)


def _hide(node: Any, name: str = "") -> Any:
    """Return plain settings with secrets replaced by HIDDEN, also in options."""
    if isinstance(node, dict):
        return {str(key): _hide(value, str(key)) for key, value in node.items()}
    if name in ("env", "headers") and isinstance(node, list | tuple):
        return [text.partition("=")[0] + f"={HIDDEN}" * ("=" in text) for text in map(str, node)]
    return HIDDEN if name == SECRET and node is not None else node


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """Return plain settings by dotted key."""
    if not isinstance(node, dict):
        return {prefix: list(node) if isinstance(node, list | tuple) else node}
    return {
        key: value
        for name, child in node.items()
        for key, value in flatten(child, f"{prefix}.{name}" if prefix else str(name)).items()
    }
