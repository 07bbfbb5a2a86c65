"""Loading of functions that settings name as FILE:FUNCTION, or saved ones as MODULE:FUNCTION."""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_jax.settings import ConfigError

_loaded: dict[str, ModuleType] = {}  # modules by path and modification time


def load_function(reference: str) -> Callable[..., Any]:
    """Return the function that `FILE:FUNCTION` names. Raises ConfigError if there is none.

    MODULE:FUNCTION is what `save_config` writes for a function that came from Python.
    """
    path, _, name = reference.rpartition(":")
    file = Path(path)
    if file.suffix != ".py" and all(map(str.isidentifier, path.split("."))):
        return _import_function(reference, path, name)
    if not file.is_file():
        raise ConfigError(
            f"{reference!r} names the file {path!r}, which does not exist; use FILE:FUNCTION with "
            "a path relative to the working directory.",
            reason="not_found",
            key=path,
        )
    state = f"{file.resolve()} {file.stat().st_mtime_ns}"  # an edited file is loaded again
    if state not in _loaded:
        _loaded[state] = _load_module(file, state)
    function = getattr(_loaded[state], name, None)
    if not callable(function):
        raise ConfigError(
            f"{reference!r} names {name!r}, but {path} has no such function.",
            reason="no_such_function",
            key=name,
        )
    return function


def _import_function(reference: str, module: str, name: str) -> Callable[..., Any]:
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{reference!r} cannot be loaded ({error}); use FILE:FUNCTION, or pass the function "
            "from Python again if a script, a notebook or another function defines it.",
            reason="not_loaded",
            key=reference,
        ) from error
    return function


def _load_module(file: Path, state: str) -> ModuleType:
    folder = str(file.resolve().parent)
    if folder not in sys.path:  # lets it import its neighbors; last, to shadow nothing
        sys.path.append(folder)
    digest = hashlib.sha1(state.encode()).hexdigest()[:12]
    module_name = _importable_name(file) or f"_loaded_{digest}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec and spec.loader, f"no import machinery for {file}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except ImportError as error:  # such as the agent's framework, which we do not require
        del sys.modules[module_name]
        raise ConfigError(
            f"{file} cannot be loaded: {error}", reason="not_loaded", key=str(file)
        ) from error
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def _importable_name(file: Path) -> str | None:
    """Return the file's own name if importing it would load the file and it is not loaded yet.

    Processes that an agent starts can then import it too. rollouts/agent_child.py has the same
    rule; it runs in interpreters without this package.
    """
    name = file.stem
    if name in sys.modules or not name.isidentifier():
        return None
    spec = importlib.util.find_spec(name)
    is_found = spec and spec.origin and Path(spec.origin).resolve() == file.resolve()
    return name if is_found else None
