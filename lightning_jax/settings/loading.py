"""Functions, programs, packages and servers that settings name, and splits of tasks.

A function is FILE:FUNCTION or, if saved, MODULE:FUNCTION.
"""

import ast
import hashlib
import importlib
import importlib.util
import inspect
import os
import random
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NotRequired, TypeVar, cast, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from lightning_jax.errors import UserError
from lightning_jax.settings.errors import ConfigError
from lightning_jax.settings.paths import file_of
from lightning_jax.settings.schema import PathKind, Rule, Section, first_problem, section

_loaded: dict[str, ModuleType] = {}  # modules by path and modification time
Item = TypeVar("Item")
DEV_SHARE = 0.2  # of tasks that come without a split


def load_function(reference: str) -> Callable[..., Any]:
    """Return the function that `FILE:FUNCTION` names. Raises ConfigError if there is none.

    MODULE:FUNCTION is what `save_config` writes for a function that came from Python.
    """
    path, _, name = reference.rpartition(":")
    if file_of(reference) is None:
        return _import_function(reference, path, name)
    file = _existing_file(reference, path)
    state = f"{file.resolve()} {file.stat().st_mtime_ns}"  # an edited file is loaded again
    if state not in _loaded:
        _loaded[state] = _load_module(file, state)
    function = getattr(_loaded[state], name, None)
    if not callable(function):
        raise _no_such_name(reference, path, name)
    return function


def check_reference(reference: str, kind: PathKind = PathKind.FUNCTION) -> None:
    """Raise ConfigError if FILE:FUNCTION or FILE:CLASS names no file, or no name in it.

    Reads the file without running it, because it may import anything. `load_function` finds the
    rest.
    """
    path, _, name = reference.rpartition(":")
    if file_of(reference) is None:
        return
    file = _existing_file(reference, path, kind)
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # perhaps of another Python, for agent.python
        return
    names = {name for node in ast.walk(tree) for name in _bound_names(node)}
    if not names & {name, "*", "__getattr__", "globals"}:
        raise _no_such_name(reference, path, name, kind)


def read_options(
    function: Callable[..., Any], arguments: Sequence[str], options: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """Return the options of a function, converted to the types in its signature.

    The function is called with these arguments by position, then with the options by name. `where`
    is the section of the settings that names it. Raises ConfigError if it cannot be called so, and
    for an option that it does not take, lacks, or takes as another type.
    """
    name = getattr(function, "__name__", type(function).__name__)
    try:
        signature = inspect.signature(function)
        first = signature.bind_partial(*arguments).arguments
    except TypeError as error:
        raise ConfigError(
            f"{where}: {name} cannot be called with ({', '.join(arguments)}): {error}",
            reason="wrong_signature",
            key=where,
        ) from error
    except ValueError:  # a builtin may have no signature
        return dict(options)
    others = (p for name, p in signature.parameters.items() if name not in first)
    parameters = [p for p in others if p.kind is not p.VAR_POSITIONAL]
    fields = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    hints = _hints(function)
    keys = {p.name: hints.get(p.name, Any) for p in fields}
    keys |= {p.name: NotRequired[keys[p.name]] for p in fields if p.default is not p.empty}
    form = cast(Any, TypedDict)("form", keys)
    form.__pydantic_config__ = ConfigDict(
        arbitrary_types_allowed=True, extra="forbid" if fields == parameters else "allow"
    )
    try:
        return TypeAdapter(form).validate_python(dict(options))
    except ValidationError as error:
        problem = first_problem(error)
        key = ".".join((where, "options", *map(str, problem.path)))
        is_extra = problem.reason == "extra_forbidden"
        fact = f"there is no option {key}" if is_extra else problem.sentence(key).removesuffix(".")
        names = ", ".join(p.name for p in fields)
        choices = f"the options {names}" if names else "no options"
        raise ConfigError.invalid(key, f"{fact}; {name} takes {choices}.") from error


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except Exception:  # noqa: BLE001  (annotations are the user's code)
        return {}


def find_program(program: str, key: str) -> str:
    """Return the path of a program. Raises ConfigError if the setting `key` names none."""
    path = shutil.which(program)
    if path is None:
        raise ConfigError.not_found(
            key,
            f"{key} names the program {program!r}, which does not exist or is not executable; use "
            "one on the PATH, or a file with execute permission.",
        )
    return path


def is_installed(module: str) -> bool:
    """Return whether a module can be imported, without importing it.

    A folder of its name, such as the ./wandb that a run of W&B leaves, is not the package.
    """
    if module in sys.modules:
        return True
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # of a package around it
        return False
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
        raise UserError.not_installed(
            re.split("[<>=]", requirement)[0],
            f"{error.name} is not installed; run pip install {shlex.quote(requirement)}.",
        ) from error


@section
class ModelServer(Section):
    """Model of the run, or of an OpenAI-compatible server that the run has a key for."""

    served_model: str | None = None
    """For a URL: model to request."""
    api_key_env: str | None = None
    """For a URL: environment variable with the key."""

    @property
    def url(self) -> str | None:
        """Return the URL of the server, or None if no other server answers."""
        raise NotImplementedError

    def rules(self) -> Iterator[Rule]:
        is_named, has_url = self.served_model is not None, self.url is not None
        yield "served_model", is_named == has_url, "expected the model of a URL, else none"
        has_use = has_url or self.api_key_env is None
        yield "api_key_env", has_use, "expected none, because only a URL needs a key"

    @property
    def key(self) -> str | None:
        """Return the key of the server. Raises ConfigError if the variable is not set."""
        if self.api_key_env is None:
            return None
        if key := os.environ.get(self.api_key_env):
            return key
        raise ConfigError.missing(
            self.api_key_env,
            f"the environment variable {self.api_key_env} of a model's key is not set; set it.",
        )


def _existing_file(reference: str, path: str, kind: PathKind = PathKind.FUNCTION) -> Path:
    if not Path(path).is_file():
        raise ConfigError.not_found(
            path,
            f"{reference!r} names the file {path!r}, which does not exist; use {kind.value} with "
            "a path relative to the config file, or to the working directory in key=value.",
        )
    return Path(path)


def _no_such_name(
    reference: str, path: str, name: str, kind: PathKind = PathKind.FUNCTION
) -> ConfigError:
    return ConfigError(
        f"{reference!r} names {name!r}, but {path} has no such {kind.name.lower()}.",
        reason="no_such_function",
        key=name,
    )


def _bound_names(node: ast.AST) -> list[str]:
    """Return names that a statement or expression may define, or that may define any others."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Import() | ast.ImportFrom():
            return [alias.asname or alias.name for alias in node.names]
        case ast.Name():
            return [node.id] if isinstance(node.ctx, ast.Store) or node.id == "globals" else []
    return []


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

    Processes that an agent starts can then import it too. rollouts/agents/child.py has the same
    rule; it runs in interpreters without this package.
    """
    name = file.stem
    if name in sys.modules or not name.isidentifier():
        return None
    spec = importlib.util.find_spec(name)
    is_found = spec and spec.origin and Path(spec.origin).resolve() == file.resolve()
    return name if is_found else None


def indices_of(split: str, number: int) -> list[int]:
    """Return which of `number` tasks are in the split, in order. A fixed fifth is dev."""
    num_dev = min(max(1, int(DEV_SHARE * number)), number)
    dev = set(random.Random(0).sample(range(number), num_dev))
    return [index for index in range(number) if (index in dev) == (split == "dev")]


def part_of(split: str, tasks: Sequence[Item]) -> list[Item]:
    """Return the tasks of the split, in order."""
    return [tasks[index] for index in indices_of(split, len(tasks))]
