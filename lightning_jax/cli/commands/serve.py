"""`lightning-jax serve`: its flags, and its errors in terms of them.

Nothing heavy is imported before the command runs.
"""

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from lightning_jax.cli.command import Command, UsageError, flag
from lightning_jax.engine.config import LONGEST, ServeConfig
from lightning_jax.errors import InvalidValue, UserError
from lightning_jax.models.config import ModelConfig
from lightning_jax.models.model_files import local_path
from lightning_jax.settings.schema import Count, NonNegative, Rule, Section, section

if TYPE_CHECKING:
    from lightning_jax.gateway.app import Gateway


@section
class ServerConfig(Section):
    """Settings of a server without a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    fits_slots: bool = True
    """Serve fewer requests at once than serve.slots where memory is short of a long context."""
    any_model: bool = False
    """Answer for unknown model names, as under the URL of a rollout."""
    record: str | None = None
    """SQLite file that records every call; None: do not record."""
    drain_s: NonNegative = 30.0
    """Time that running requests have to finish at shutdown."""
    tensor: Count = 1
    """GPUs or TPUs per copy of the model; the others hold more copies."""

    def rules(self) -> Iterator[Rule]:
        yield "record", self.record != "", "expected the name of a file"


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def _serve_flag(text: str, name: str) -> Any:
    """Return a flag with the default of ServeConfig."""
    return flag(f"{text} (default: %(default)s)", default=getattr(ServeConfig, name))


@dataclass(frozen=True, kw_only=True)
class Serve(Command):
    """Serve a model over OpenAI's API and others. Stop with Ctrl-C."""

    model: str = flag(
        "Hugging Face directory or hub id, .gguf file, or smollm2-135m-instruct "
        "(default: %(default)s)",
        default=ModelConfig.name,
    )
    dtype: Literal["float32", "bfloat16", "auto"] = flag(
        "dtype of weights and activations; auto: the fastest on this machine "
        "(default: %(default)s)",
        default=ModelConfig.dtype,
    )
    activation_dtype: Literal["float32"] | None = flag(
        "dtype of activations with bfloat16 weights, for a CPU (default: same as --dtype)"
    )
    chat_template: str | None = flag(
        "Jinja file to use instead of the model's own chat template", "FILE"
    )
    chat_template_kwargs: dict[str, Any] | None = flag(
        """the template's variables, such as '{"enable_thinking": false}'""",
        "JSON",
        type=_json_object,
    )
    host: str = _serve_flag("address to listen on", "host")
    port: int = _serve_flag("port to listen on, 0 for any free one", "port")
    slots: int | None = flag(
        "number of requests decoded at once, per copy of the model (default: "
        f"{ServeConfig.slots}, or as many as fit in memory)"
    )
    max_len: int | None = flag(
        "maximum number of tokens of prompt plus response (default: the model's positions, at most "
        f"{LONGEST}, as far as memory allows with 2 slots)"
    )
    prefill_s: float = _serve_flag(
        "longest time in seconds that prompts hold up the next token of a response", "prefill_s"
    )
    prefix_cache_mib: float | None = flag(
        "memory for cached prompts in MiB, 0 for none (default: as much as the slots, if it fits)"
    )
    max_queue: int = _serve_flag(
        "maximum number of waiting requests; further ones get a 429", "max_queue"
    )
    max_connections: int = _serve_flag(
        "maximum number of connections; the next one closes an idle one", "max_connections"
    )
    idle_connection_s: float = _serve_flag(
        "seconds before an idle connection is closed", "idle_connection_s"
    )
    slow_request_s: float = _serve_flag(
        "seconds to receive a whole request; a slower one gets a 408", "slow_request_s"
    )
    tensor: int = flag(
        "devices that share one copy of the model; other devices get further copies (default: 1)",
        default=ServerConfig.tensor,
    )
    api_key: str | None = flag("API key that clients must send (default: a random one, printed)")
    any_model: bool = flag(
        "answer for any model name, as coding agents ask for some of their own", default=False
    )
    record: str | None = flag("record every call in this SQLite file", "FILE")
    drain_s: float = flag(
        "seconds to finish running requests after Ctrl-C (default: %(default)g)",
        default=ServerConfig.drain_s,
    )

    def run(self) -> int:
        try:
            config = self._config()
        except InvalidValue as error:
            raise UsageError(str(error), reason=error.reason, key=error.key) from error

        def announce(gateway: "Gateway") -> None:
            key = "" if self.api_key else f" with API key {gateway.api_key}"
            print(f"{gateway.model_name} answers at {gateway.url}/v1{key}", flush=True)

        try:
            local_path(self.model)  # a wrong one is refused before JAX is imported

            from lightning_jax.cli.serve import serve

            serve(config, announce)
        except UserError as error:  # with the flags of `serve` in place of the settings of a run
            sentence = _SETTING.sub(lambda match: _FLAG_OF.get(match[1], match[0]), str(error))
            raise UserError(sentence, reason=error.reason, key=error.key) from error
        return 0

    def _config(self) -> ServerConfig:
        model = {name: getattr(self, name) for name in _MODEL_FLAGS}
        model["chat_template_kwargs"] = self.chat_template_kwargs or {}
        serve = {name: getattr(self, name) for name in _SERVE_FLAGS}
        serve["slots"] = ServeConfig.slots if self.slots is None else self.slots
        return ServerConfig(
            model=ModelConfig(name=self.model, **model),
            serve=ServeConfig(**serve),
            fits_slots=self.slots is None,
            any_model=self.any_model,
            record=self.record,
            drain_s=self.drain_s,
            tensor=self.tensor,
        )


# Flags that set fields of these sections.
_MODEL_FLAGS, _SERVE_FLAGS = (
    [item.name for item in fields(Serve) if item.name in {f.name for f in fields(section)}]
    for section in (ModelConfig, ServeConfig)
)
_FLAG_OF = {
    "model.name": "--model",
    **{f"model.{name}": f"--{name.replace('_', '-')}" for name in _MODEL_FLAGS},
    **{f"serve.{name}": f"--{name.replace('_', '-')}" for name in _SERVE_FLAGS},
}
# A setting, perhaps with the flag beside it.
_SETTING = re.compile(r"\b((?:model|serve)\.[a-z_]+)\b(?: or --[a-z-]+)?")
