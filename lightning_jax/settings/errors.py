"""Errors in settings, each as one sentence with the key and the fix."""

import difflib
from collections.abc import Callable, Iterator, Sequence
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
    section = key.rpartition(".")[0]
    if close:
        fix = f"did you mean {' or '.join(close)}?"
    elif schema and section in section_keys(schema):
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
    known = list(section_keys(schema))
    section, _, name = key.rpartition(".")
    words = set(name.split("_"))

    def those(fits: Callable[[str, str], bool]) -> list[str]:
        parts = [(*other.rpartition(".")[::2], other) for other in known]
        found = [
            (above != section, len(other), other)
            for above, leaf, other in parts
            if fits(above, leaf)
        ]
        return [other for _, _, other in sorted(found)][:3]

    aliases = ALIASES.get(name) or ALIASES.get(key.replace(".", "_")) or ()
    return (
        those(
            lambda above, leaf: (
                leaf == name or (above == section != "" and leaf.startswith(f"{name}_"))
            )
        )
        or [other for other in aliases if other in known]
        or those(lambda _, leaf: len(name) > 1 and _initials(leaf) == name)
        or those(lambda _, leaf: words < set(leaf.split("_")))
        or _similar_spelling(key, known)
    )


def _initials(leaf: str) -> str:
    return "".join(word[:1] for word in leaf.split("_"))


def _similar_spelling(key: str, known: Sequence[str]) -> list[str]:
    """Return the key with the most similar spelling, of the same section if there is one."""
    section, _, name = key.rpartition(".")
    if section not in known:
        return difflib.get_close_matches(key, known, 1)
    leaves = [leaf for above, _, leaf in (k.rpartition(".") for k in known) if above == section]
    return [f"{section}.{leaf}" for leaf in difflib.get_close_matches(name, leaves, 1)]
