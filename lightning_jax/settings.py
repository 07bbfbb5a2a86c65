"""Settings from YAML files and the command line, checked and saved."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, LiteralNode, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException
from yaml import YAMLError

from lightning_jax.errors import FieldError, InvalidValue, UserError
from lightning_jax.system.files import write_whole

T = TypeVar("T")

# Placeholder for a secret in a saved file. Loading such a file requires the value to be set.
HIDDEN = "???"
SECRET = "api_key"  # field that is never saved, in any section
MOVED = {  # old keys and their new names
    "rollout.agent": "agent.function",
    "search": "data.options.search",
    **{
        f"data.{name}": f"data.options.{name}"
        for name in ("max_schema_chars", "require_rows", "sources", "max_question_chars")
    },
}


class ConfigError(UserError, ValueError):
    """Invalid setting. The message is one sentence for the person who wrote the setting."""


def load_config(schema: type[T], argv: list[str], *, only: Sequence[str] | None = None) -> T:
    """Load settings from YAML paths and `dotted.key=value` pairs; later arguments win.

    A file may name a base file, relative to itself (`base: spider_cpu.yaml`). The base is read
    first, unless `argv` already named it. `only` names the sections to read; the others keep their
    defaults. A reader of an older run then ignores settings it does not use and secrets that were
    not saved.

    Raises ConfigError for an invalid setting, or if a file requires a key (`key: ???`) that is not
    set.
    """
    merged, given = OmegaConf.structured(schema), OmegaConf.create()
    for name, layer in _layers(argv):
        with _config_errors(name):
            if only is not None:
                layer = OmegaConf.masked_copy(layer, list(only))
            layer = _from_home(layer)
            merged = OmegaConf.merge(merged, layer)
            given = OmegaConf.merge(given, layer)
    try:
        # `merged` has defaults for missing keys. A reader of a run does not need its secrets.
        missing = OmegaConf.missing_keys(given)
        unset = sorted(key for key in missing if only is None or not _is_secret(key))
        if not unset:
            return _to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(_one_sentence(error), **_fields(error)) from error
    except InvalidValue as error:
        raise ConfigError(str(error), reason=error.reason, key=error.key) from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
    message = f"{unset[0]} is required; add {unset[0]}=VALUE."
    raise ConfigError(message, reason="missing", key=unset[0])


def save_config(config: Any, path: Path) -> None:
    """Write the resolved settings as YAML, with HIDDEN in place of secrets.

    A function is written as MODULE:FUNCTION.
    """
    write_whole(path, OmegaConf.to_yaml(OmegaConf.create(_hide(_as_container(config)))))


def _as_container(config: Any) -> Any:
    return OmegaConf.to_container(OmegaConf.structured(_with_references(config)))


def _with_references(section: Any) -> Any:
    """Return the settings with MODULE:FUNCTION in place of each function."""
    changed = {}
    for name in (field.name for field in fields(section)):
        value = getattr(section, name)
        if callable(value):
            qualname = getattr(value, "__qualname__", type(value).__qualname__)
            changed[name] = f"{value.__module__}:{qualname}"
        elif is_dataclass(value):
            changed[name] = _with_references(value)
    return replace(section, **changed)


def _is_secret(key: str) -> bool:
    return key.rpartition(".")[2] == SECRET


def _hide(node: Any, name: str = "") -> Any:
    """Return plain settings with secrets replaced by HIDDEN."""
    if isinstance(node, dict):
        return {str(key): _hide(value, str(key)) for key, value in node.items()}
    if name == "env":  # variables of agents' programs
        return [text.partition("=")[0] + f"={HIDDEN}" * ("=" in text) for text in node]
    return HIDDEN if name == SECRET and node is not None else node


def _where(arg: str) -> str:
    if not _is_setting(arg):
        return f"config {arg}"
    key, _, value = arg.partition("=")
    is_secret = _is_secret(key) or key == "agent.env"
    return f"setting {f'{key}={HIDDEN if is_secret else value}'!r}"


def _is_setting(arg: str) -> bool:
    """Return True if `arg` is key=value. The path of a file may also contain "="."""
    return "=" in arg and not Path(arg).is_file()


@contextmanager
def _config_errors(arg: str) -> Iterator[None]:
    """Convert errors in what `arg` sets to a ConfigError that names it."""
    key = arg.partition("=")[0] if _is_setting(arg) else arg
    try:
        yield
    except OmegaConfBaseException as error:
        message = f"{_where(arg)}: {_one_sentence(error)}"
        raise ConfigError(message, **({"key": key} | _fields(error))) from error
    except TypeError as error:  # from OmegaConf, for a list in place of names
        raise ConfigError(
            f"{_where(arg)} is a list or a value; expected named settings, such as `num_steps: 20` "
            f"({_one_sentence(error)}).",
            reason="wrong_type",
            key=key,
        ) from error
    except YAMLError as error:  # in a setting; _load_yaml has converted a file's error
        message = f"{_where(arg)} is not readable YAML: {_one_sentence(error)}"
        raise ConfigError(message, reason="malformed", key=key) from error


def _layers(argv: Sequence[str]) -> list[tuple[str, Any]]:
    """Return (name, settings) for each argument. The base files of a file come before it."""
    found: list[tuple[str, Any]] = []
    for arg in argv:
        if _is_setting(arg):
            with _config_errors(arg):
                found.append((arg, OmegaConf.from_dotlist([arg])))
        else:
            found += _file_layers(arg, [name for name, _ in found])
    return found


def _from_home(layer: Any) -> Any:
    """Expand paths that begin with ~, because no shell has done so."""

    def expanded(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: expanded(value) for key, value in node.items()}
        if isinstance(node, list):
            return [expanded(value) for value in node]
        is_path = isinstance(node, str) and node.startswith("~/")
        return str(Path(node).expanduser()) if is_path else node

    if not isinstance(layer, DictConfig):
        return layer  # merging raises
    return OmegaConf.create(expanded(OmegaConf.to_container(layer)))


def _file_layers(path: str, before: Sequence[str]) -> list[tuple[str, Any]]:
    """Return a file and its base files, lowest first, without the files in `before`.

    A cycle of bases ends where it returns to a file.
    """
    with _config_errors(path):
        layer = _load_yaml(path)
        base = layer.pop("base", None) if isinstance(layer, DictConfig) else None
    if base is None:
        return [(path, layer)]
    below = Path(path).parent / str(base)
    if not below.is_file():
        raise ConfigError(
            f"config {path} has base: {base}, but {below} does not exist; the path is relative to "
            "the config.",
            reason="not_found",
            key=str(below),
        )
    if below.resolve() in {Path(name).resolve() for name in before}:
        return [(path, layer)]
    return [*_file_layers(str(below), [*before, path]), (path, layer)]


def _load_yaml(path: str) -> Any:
    if not Path(path).is_file():
        raise ConfigError(
            f"config {path} does not exist; expected a YAML file or key=value. Check the path.",
            reason="not_found",
            key=path,
        )
    try:
        return OmegaConf.load(path)
    except (YAMLError, OSError, UnicodeDecodeError) as error:
        message = f"config {path} is not readable YAML: {error}"
        raise ConfigError(message, reason="malformed", key=path) from error


def _to_object(node: Any, key: str = "") -> Any:
    """Convert the section at `key`.

    Raises FieldError with the full key of a field that is invalid.
    """
    try:
        return OmegaConf.to_object(node)
    except FieldError as error:
        for name in node:
            if OmegaConf.is_dict(node[name]):  # its own error has the longer key
                _to_object(node[name], f"{key}.{name}" if key else str(name))
        if not key:
            raise
        raise FieldError(f"{key}.{error}", reason=error.reason, key=f"{key}.{error.key}") from error


def _fields(error: OmegaConfBaseException) -> dict[str, str]:
    """Return the reason and, where OmegaConf names one, the key of an error."""
    key = {"key": error.full_key} if error.full_key else {}
    if error.full_key in MOVED:
        return key | {"reason": "moved"}
    if isinstance(error, InterpolationResolutionError):
        return key | {"reason": "unresolved"}
    is_unknown = isinstance(error, KeyError) or isinstance(error.child_node, LiteralNode)
    return key | {"reason": "unknown" if is_unknown else "wrong_type"}


def _one_sentence(error: Exception) -> str:
    """Return OmegaConf's message without its block of fields."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    key = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("full_key:")), ""
    )
    sentence = f"{key}: {lines[0]}" if key and key not in lines[0] else lines[0]
    if isinstance(error, InterpolationResolutionError):
        sentence += r"; write \${...} for a variable of a shell"
    return f"{sentence}; it is {MOVED[key]} now" if key in MOVED else sentence


def changed_keys(path: Path, config: Any) -> list[str]:
    """Return the dotted keys in which `config` differs from the settings saved at `path`.

    Secrets are not compared. A key missing in the file counts as its default, so a new setting does
    not change old runs. Raises ConfigError for a damaged file.
    """
    if not path.exists():
        return []
    try:
        saved = OmegaConf.to_container(OmegaConf.load(path))
        if not saved or not isinstance(saved, dict):
            raise ValueError("it holds no settings")
    except (YAMLError, OSError, ValueError, OmegaConfBaseException) as error:
        raise ConfigError(
            f"{path} is damaged ({_one_sentence(error)}); delete it to continue with the current "
            "settings, or set another run_dir.",
            reason="malformed",
            key=str(path),
        ) from error
    old = _flatten(_hide(_as_container(type(config)()))) | _flatten(_hide(saved))
    new = _flatten(_hide(_as_container(config)))
    keys = (key for key in old.keys() | new.keys() if not _is_secret(key))
    return sorted(key for key in keys if old.get(key) != new.get(key))


def _flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(node, dict):
        return {prefix: list(node) if isinstance(node, list | tuple) else node}
    return {
        key: value
        for name, child in node.items()
        for key, value in _flatten(child, f"{prefix}.{name}" if prefix else str(name)).items()
    }
