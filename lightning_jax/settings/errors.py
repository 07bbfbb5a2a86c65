"""Errors in settings, each as one sentence with the key and the fix."""

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from omegaconf import LiteralNode
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException
from yaml import YAMLError

from lightning_jax.errors import UserError
from lightning_jax.schema import section_keys

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


@dataclass(frozen=True)
class Argument:
    """Path of a YAML file, or `dotted.key=value`."""

    text: str

    @property
    def is_setting(self) -> bool:
        """True for key=value. The path of a file may also contain "="."""
        return "=" in self.text and not Path(self.text).is_file()

    @property
    def key(self) -> str:
        return self.text.partition("=")[0] if self.is_setting else self.text

    def __str__(self) -> str:
        if not self.is_setting:
            return f"config {self.text}"
        key, _, value = self.text.partition("=")
        hides = is_secret(key) or key == "agent.env"
        return f"setting {f'{key}={HIDDEN if hides else value}'!r}"


def is_secret(key: str) -> bool:
    return key.rpartition(".")[2] == SECRET


@contextmanager
def config_errors(argument: Argument, schema: type | None = None) -> Iterator[None]:
    """Convert errors in what `argument` sets to a ConfigError that names it."""
    try:
        yield
    except OmegaConfBaseException as error:
        fields = error_fields(error)
        is_key = isinstance(error, KeyError) and fields["reason"] == "unknown" and "key" in fields
        sentence = _unknown(fields["key"], schema) if is_key else one_sentence(error)
        message = f"{argument}: {sentence}"
        raise ConfigError(message, **({"key": argument.key} | fields)) from error
    except TypeError as error:  # from OmegaConf, for a list in place of names
        raise ConfigError(
            f"{argument} is a list or a value; expected named settings, such as `num_steps: 20` "
            f"({one_sentence(error)}).",
            reason="wrong_type",
            key=argument.key,
        ) from error
    except YAMLError as error:  # in a setting; load_yaml has converted a file's error
        message = f"{argument} is not readable YAML: {one_sentence(error)}"
        raise ConfigError(message, reason="malformed", key=argument.key) from error


def error_fields(error: OmegaConfBaseException) -> dict[str, str]:
    """Return the reason and, where OmegaConf names one, the key of an error."""
    key = {"key": error.full_key} if error.full_key else {}
    if error.full_key in MOVED:
        return key | {"reason": "moved"}
    if isinstance(error, InterpolationResolutionError):
        return key | {"reason": "unresolved"}
    is_unknown = isinstance(error, KeyError) or isinstance(error.child_node, LiteralNode)
    return key | {"reason": "unknown" if is_unknown else "wrong_type"}


def one_sentence(error: Exception) -> str:
    """Return OmegaConf's message without its block of fields."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    key = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("full_key:")), ""
    )
    if key in MOVED:
        return f"{key} is {MOVED[key]} now"
    sentence = f"{key}: {lines[0]}" if key and key not in lines[0] else lines[0]
    if isinstance(error, InterpolationResolutionError):
        sentence += r"; write \${...} for a variable of a shell"
    return sentence


def _unknown(key: str, schema: type | None) -> str:
    close = similar_keys(key, schema) if schema else []
    fix = f"did you mean {' or '.join(close)}?" if close else "lightning-jax config lists all."
    return f"there is no setting {key}; {fix}"


def similar_keys(key: str, schema: type) -> list[str]:
    """Return the keys that someone who wrote `key` may have meant, at most three.

    These are keys with the same name in other sections, else those with a similar spelling.
    """
    known = list(section_keys(schema))
    name = key.rpartition(".")[2]
    same = [other for other in known if other.rpartition(".")[2] == name]
    return sorted(same, key=len)[:3] or difflib.get_close_matches(key, known, 1)
