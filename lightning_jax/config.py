"""Every knob in one frozen dataclass, and `load_config`, which reads YAML files and `key=value`
pairs.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException
from yaml import YAMLError

from lightning_jax.config_learning import (
    AlgorithmConfig,
    BatchConfig,
    OptimizerConfig,
    WarmupConfig,
)
from lightning_jax.config_roles import (
    PolicyConfig,
    RewardRule,
    RoleConfig,
    check_policies,
    policy_places,
)
from lightning_jax.config_sections import (
    AgentConfig,
    CheckpointConfig,
    DataConfig,
    DistributedConfig,
    EvalConfig,
    FieldError,
    MeshConfig,
    ModelConfig,
    RolloutConfig,
    SearchConfig,
    ServeConfig,
    require,
)
from lightning_jax.files import write_whole
from lightning_jax.types import InvalidValue, UserError

T = TypeVar("T")

# What a saved file holds in place of a secret. Such a file asks for the value when it is loaded.
HIDDEN = "???"
SECRET = "api_key"  # the name of a field, in whatever section, that is never saved

MOVED = {"rollout.agent": "agent.function"}  # keys that once were, and where they are now


@dataclass(frozen=True)
class Config:
    """One run. `run_dir` holds all it leaves, and all it needs to go on after a crash."""

    run_dir: str = "runs/default"
    seed: int = 0
    num_steps: int = 20  # GRPO steps, after the warm-up's
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    policies: dict[str, PolicyConfig] = field(default_factory=dict)  # by name; none: there is one
    roles: dict[str, RoleConfig] = field(default_factory=dict)  # by name; the first that fits
    reward_rules: dict[str, RewardRule] = field(default_factory=dict)  # by name
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)

    def __post_init__(self) -> None:
        require(
            self,
            seed=(self.seed >= 0, "0 or more"),
            num_steps=(self.num_steps >= 0, "0 or more"),
        )
        check_policies(self.policies, self.roles, self.model, self.algorithm)
        if self.policies and self.serve.orchestrator != "native":
            raise InvalidValue(
                f"serve.orchestrator is {self.serve.orchestrator!r} with several policies; "
                "expected native, as JetStream's has no place for a request's policy.",
                reason="conflict",
                key="serve.orchestrator",
            )

    @property
    def adapters(self) -> dict[str, int]:
        """The place of each policy's adapter among all; empty where there is one policy, or each
        has weights of its own.
        """
        return policy_places(self.policies) if self.model.lora.rank else {}

    @property
    def num_adapters(self) -> int | None:
        """Of each kernel that has several; None where it has one or none."""
        return len(self.adapters) or None

    @property
    def weights(self) -> tuple[str, ...]:
        """The sets of weights that are trained and served apart: "" alone, or the policies that
        have weights of their own, by name and in order.
        """
        return ("",) if self.model.lora.rank else tuple(self.policies) or ("",)

    @property
    def trained_weights(self) -> tuple[str, ...]:
        """Those of `weights` that steps after the warm-up change."""
        return tuple(name for name in self.weights if not name or self.policies[name].trains)

    @property
    def total_steps(self) -> int:
        return self.warmup.num_steps + self.num_steps


class ConfigError(UserError, ValueError):
    """A setting is wrong; the message is one sentence for the person who wrote it."""


def load_config(schema: type[T], argv: list[str], *, only: Sequence[str] | None = None) -> T:
    """`argv`: YAML paths and `dotted.key=value`, in order; later wins. A file may stand on another,
    which it names as seen from itself (`base: spider_cpu.yaml`): that is read before it, unless it
    was named already. Raises ConfigError, also where a file asks for a key (`key: ???`) that
    nothing sets.

    `only` names the sections to read; the others keep their defaults. So a reader of an older run
    does not stumble over settings that it has no use for, nor over secrets that were not saved.
    """
    merged, given = OmegaConf.structured(schema), OmegaConf.create()
    for name, layer in _layers(argv):
        with _told(name):
            if only is not None:
                layer = OmegaConf.masked_copy(layer, list(only))
            layer = _from_home(layer)
            merged = OmegaConf.merge(merged, layer)
            given = OmegaConf.merge(given, layer)
    try:
        # In `merged` they keep their defaults. A reader of a run has no use for its secrets.
        unset = sorted(
            key for key in OmegaConf.missing_keys(given) if only is None or not _is_secret(key)
        )
        if unset:
            raise ConfigError(
                f"{unset[0]} is left to be set by one of the files; add {unset[0]}=VALUE.",
                reason="missing",
                key=unset[0],
            )
        return _to_object(merged)
    except ConfigError:
        raise
    except OmegaConfBaseException as error:
        raise ConfigError(_one_sentence(error), **_fields(error)) from error
    except InvalidValue as error:
        raise ConfigError(str(error), reason=error.reason, key=error.key) from error
    except ValueError as error:
        raise ConfigError(str(error)) from error


def save_config(config: Any, path: Path) -> None:
    """Write the resolved settings as YAML, with HIDDEN in place of secrets."""
    write_whole(path, OmegaConf.to_yaml(OmegaConf.create(_hide(_as_container(config)))))


def _as_container(config: Any) -> Any:
    return OmegaConf.to_container(OmegaConf.structured(config))


def _is_secret(key: str) -> bool:
    return key.rpartition(".")[2] == SECRET


def _hide(node: Any, name: str = "") -> Any:
    """Return plain settings without the values of secrets."""
    if isinstance(node, dict):
        return {str(key): _hide(value, str(key)) for key, value in node.items()}
    if name == "env":  # of agents' programs
        return [text.partition("=")[0] + f"={HIDDEN}" * ("=" in text) for text in node]
    return HIDDEN if name == SECRET and node is not None else node


def _where(arg: str) -> str:
    if not _is_setting(arg):
        return f"config {arg}"
    key, _, value = arg.partition("=")
    is_secret = _is_secret(key) or key == "agent.env"
    return f"setting {f'{key}={HIDDEN if is_secret else value}'!r}"


def _is_setting(arg: str) -> bool:
    """Whether it is key=value; the path of a file may hold a "=", too."""
    return "=" in arg and not Path(arg).is_file()


@contextmanager
def _told(arg: str) -> Iterator[None]:
    """Says a fault in what the argument sets as one sentence that names it."""
    key = arg.partition("=")[0] if _is_setting(arg) else arg
    try:
        yield
    except OmegaConfBaseException as error:
        message = f"{_where(arg)}: {_one_sentence(error)}"
        raise ConfigError(message, **({"key": key} | _fields(error))) from error
    except TypeError as error:  # of OmegaConf, for a list where names are expected
        raise ConfigError(
            f"{_where(arg)} has a list or a value where settings by name are expected, such as "
            f"`num_steps: 20` ({_one_sentence(error)}).",
            reason="wrong_type",
            key=key,
        ) from error
    except YAMLError as error:  # of a setting; a file's has been told as one
        message = f"{_where(arg)} is not readable YAML: {_one_sentence(error)}"
        raise ConfigError(message, reason="malformed", key=key) from error


def _layers(argv: Sequence[str]) -> list[tuple[str, Any]]:
    """What each argument sets, under its name, and before a file those that it stands on."""
    found: list[tuple[str, Any]] = []
    for arg in argv:
        if _is_setting(arg):
            with _told(arg):
                found.append((arg, OmegaConf.from_dotlist([arg])))
        else:
            found += _file_layers(arg, [name for name, _ in found])
    return found


def _from_home(layer: Any) -> Any:
    """The layer with paths that begin with ~, which no shell has expanded, in full."""

    def expanded(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: expanded(value) for key, value in node.items()}
        if isinstance(node, list):
            return [expanded(value) for value in node]
        is_path = isinstance(node, str) and node.startswith("~/")
        return str(Path(node).expanduser()) if is_path else node

    if not isinstance(layer, DictConfig):
        return layer  # which merging refuses
    return OmegaConf.create(expanded(OmegaConf.to_container(layer)))


def _file_layers(path: str, before: Sequence[str]) -> list[tuple[str, Any]]:
    """A file and those it stands on, the lowest first, without those of `before`; a circle ends
    where it comes back to itself.
    """
    with _told(path):
        layer = _load_yaml(path)
        base = layer.pop("base", None) if isinstance(layer, DictConfig) else None
    if base is None:
        return [(path, layer)]
    below = Path(path).parent / str(base)
    if not below.is_file():
        raise ConfigError(
            f"config {path} has base: {base}, but {below} does not exist; expected a YAML file, as "
            "seen from this one. Check the path.",
            reason="not_found",
            key=str(below),
        )
    if below.resolve() in {Path(each).resolve() for each in before}:
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
    """The section at this dotted key. Raises ConfigError with the whole key of a field that its own
    section, which does not know where it stands, finds wrong.
    """
    try:
        return OmegaConf.to_object(node)
    except FieldError as error:
        for name in node:
            if OmegaConf.is_dict(node[name]):  # then its error comes before that of the whole
                _to_object(node[name], f"{key}.{name}" if key else str(name))
        if not key:
            raise ConfigError(str(error), reason=error.reason, key=error.key) from error
        raise ConfigError(
            f"{key}.{error}", reason=error.reason, key=f"{key}.{error.key}"
        ) from error


def _fields(error: OmegaConfBaseException) -> dict[str, str]:
    """Return the reason and, where OmegaConf names one, the key of an error."""
    key = {"key": error.full_key} if error.full_key else {}
    if error.full_key in MOVED:
        return key | {"reason": "moved"}
    if isinstance(error, InterpolationResolutionError):
        return key | {"reason": "unresolved"}
    return key | {"reason": "unknown" if isinstance(error, KeyError) else "wrong_type"}


def _one_sentence(error: Exception) -> str:
    """OmegaConf's message without its block of fields."""
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

    Secrets are not compared. A key that the file lacks counts as its default, so that a new setting
    changes no run. Raises ConfigError for a damaged file.
    """
    if not path.exists():
        return []
    try:
        saved = OmegaConf.to_container(OmegaConf.load(path))
        if not saved or not isinstance(saved, dict):
            raise ValueError("it holds no settings")
    except (YAMLError, OSError, ValueError, OmegaConfBaseException) as error:
        raise ConfigError(
            f"{path} is damaged ({_one_sentence(error)}); delete it to go on with the settings "
            "given now, or set another run_dir.",
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
