"""Errors in settings, each as one sentence with the key and the fix."""

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from lightning_jax.errors import UserError
from lightning_jax.settings.schema import (
    HIDDEN,
    SECRET,
    UNKNOWN_KEY,
    VARIABLES,
    field_error,
    section_keys,
)

# Names in other programs, and the settings that do the same.
ALIASES = {
    "batch_size": ("rollout.tasks_per_step", "batch.rows"),
    "train_batch_size": ("rollout.tasks_per_step",),
    "num_generations": ("rollout.group_size",),
    "rollout_n": ("rollout.group_size",),
    "max_steps": ("num_steps",),
    "beta": ("algorithm.kl_coef",),
    "clip_range": ("algorithm.clip_low", "algorithm.clip_high"),
    "epsilon": ("algorithm.clip_low", "algorithm.clip_high"),
    "max_new_tokens": ("rollout.max_tokens",),
    "max_completion_length": ("rollout.max_tokens",),
    "max_response_length": ("rollout.max_tokens",),
    "max_prompt_length": ("serve.max_len",),
    "max_model_len": ("serve.max_len",),
    "context_length": ("serve.max_len",),
    "output_dir": ("run_dir",),
    "resume": ("run_dir",),
    "save_steps": ("checkpoint.every",),
    "eval_steps": ("eval.every",),
    **dict.fromkeys(("report_to", "wandb", "tensorboard", "mlflow"), ("metrics.sinks",)),
    "gradient_checkpointing": ("model.remat",),
    "enable_thinking": ("model.chat_template_kwargs",),
    "thinking": ("model.chat_template_kwargs",),
    "model_path": ("model.name",),
    "model_name_or_path": ("model.name",),
    "lora_rank": ("model.lora.rank",),
    "tensor_parallel_size": ("mesh.tensor", "serve.mesh.tensor"),
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
        hides = SECRET in self.text or key.rpartition(".")[2] in VARIABLES
        return f"setting {f'{key}={HIDDEN if hides else value}'!r}"


def is_secret(key: str) -> bool:
    return key.rpartition(".")[2] == SECRET


def one_sentence(error: Exception) -> str:
    """Return the message of OmegaConf or YAML without its block of fields."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    key = getattr(error, "full_key", None)
    return f"{key}: {lines[0]}" if key and key not in lines[0] else lines[0]


def as_config_error(
    error: Exception,
    schema: type,
    argument_of: Callable[[str], Argument | None],
) -> ConfigError:
    """Return the error of settings that refer to no setting, or that `schema` does not allow.

    `error` is OmegaConf's or pydantic's. The sentence names the argument, unless a value is of the
    right type and only out of its range.
    """
    if isinstance(error, ValidationError):
        wrong = field_error(error)
        key, reason, sentence = wrong.key or "", wrong.reason, str(wrong)
    else:
        key, reason = getattr(error, "full_key", None) or "", "unresolved"
        sentence = one_sentence(error) + r"; write \${...} for a variable of a shell"
    argument = argument_of(key) if reason in ("unresolved", UNKNOWN_KEY, "wrong_type") else None
    if reason == UNKNOWN_KEY:
        reason, sentence = "unknown", _unknown(key, schema)
    return ConfigError(f"{argument}: {sentence}" if argument else sentence, reason=reason, key=key)


def _unknown(key: str, schema: type) -> str:
    section = key.rpartition(".")[0]
    if close := similar_keys(key, schema):
        fix = f"did you mean {' or '.join(close)}?"
    elif section in section_keys(schema):
        fix = f"lightning-jax config {section} lists those of {section}."
    else:
        fix = "lightning-jax config lists all."
    return f"there is no setting {key}; {fix}"


def similar_keys(key: str, schema: type) -> list[str]:
    """Return the keys that someone who wrote `key` may have meant, at most three.

    These are keys with the same name in other sections, or that continue it in the same one, else
    what other programs call so, else keys that it abbreviates (`lr`) or shortens (`epochs`), else
    one with a similar spelling.
    """
    settings = list(section_keys(schema))
    section, _, name = key.rpartition(".")
    words = set(name.split("_"))

    def those(fits: Callable[[str, str], bool]) -> list[str]:
        keys = [other for other in settings if fits(*other.rpartition(".")[::2])]
        keys.sort(key=lambda other: (other.rpartition(".")[0] != section, len(other), other))
        return keys[:3]

    aliases = ALIASES.get(name) or ALIASES.get(key.replace(".", "_")) or ()
    return (
        those(
            lambda above, leaf: (
                leaf == name or (above == section != "" and leaf.startswith(f"{name}_"))
            )
        )
        or [other for other in aliases if other in settings]
        or those(lambda _, leaf: len(name) > 1 and name == re.sub(r"_?(.)[^_]*", r"\1", leaf))
        or those(lambda _, leaf: words < set(leaf.split("_")))
        or _similar_spelling(key, settings)
    )


def _similar_spelling(key: str, settings: Sequence[str]) -> list[str]:
    """Return the key with the most similar spelling, of the same section if there is one."""
    section, _, name = key.rpartition(".")
    if section not in settings:
        return difflib.get_close_matches(key, settings, 1)
    leaves = [leaf for above, _, leaf in (k.rpartition(".") for k in settings) if above == section]
    return [f"{section}.{leaf}" for leaf in difflib.get_close_matches(name, leaves, 1)]
