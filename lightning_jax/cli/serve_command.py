"""`lightning-jax serve`: its flags, and its errors in terms of them.

Nothing heavy is imported before the command runs.
"""

import argparse
import re
import sys
from typing import TYPE_CHECKING

from lightning_jax.errors import UserError
from lightning_jax.models.formats.names import local_path

if TYPE_CHECKING:
    from lightning_jax.cli.config import ServerConfig
    from lightning_jax.gateway.app import Gateway

# Flags of `serve` that set fields of ServeConfig. Their defaults are defined there.
SERVE_FLAGS = {
    "host": "address to listen on",
    "port": "port to listen on, 0 for any free one",
    "slots": "number of requests decoded at once, per copy of the model",
    "max_len": "maximum number of tokens of prompt plus response",
    "max_queue": "maximum number of waiting requests; further ones get a 429",
    "max_connections": "maximum number of connections; the next one closes an idle one",
    "idle_connection_s": "seconds before an idle connection is closed",
    "slow_request_s": "seconds to receive a whole request; a slower one gets a 408",
}
_MODEL_FLAGS = ("dtype", "activation_dtype", "chat_template", "chat_template_kwargs")
_FLAG_OF = {
    "model.name": "--model",
    **{f"model.{name}": f"--{name.replace('_', '-')}" for name in _MODEL_FLAGS},
    **{f"serve.{name}": f"--{name.replace('_', '-')}" for name in (*SERVE_FLAGS, "api_key")},
}
# A setting, perhaps with the flag beside it.
_SETTING = re.compile(r"\b((?:model|serve)\.[a-z_]+)\b(?: or --[a-z-]+)?")


def add_serve(parser: argparse.ArgumentParser) -> None:
    from lightning_jax.cli.config import ServerConfig, add_chat_template
    from lightning_jax.engine.config import ServeConfig
    from lightning_jax.models.config import ModelConfig

    model = "Hugging Face directory or hub id, .gguf file, or smollm2-135m-instruct"
    dtype = "dtype of weights and activations; auto: the fastest on this machine"
    parser.add_argument("--model", default=ModelConfig.name, help=f"{model} (default: %(default)s)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "auto"),
        default=ModelConfig.dtype,
        help=f"{dtype} (default: %(default)s)",
    )
    activation = "dtype of activations with bfloat16 weights, for a CPU (default: same as --dtype)"
    parser.add_argument("--activation-dtype", choices=("float32",), help=activation)
    add_chat_template(parser)
    for name, text in SERVE_FLAGS.items():
        default, text = getattr(ServeConfig, name), f"{text} (default: %(default)s)"
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=type(default), default=default, help=text)
    tensor = (
        "devices that share one copy of the model; other devices get further copies (default: 1)"
    )
    parser.add_argument("--tensor", type=int, default=ServerConfig.tensor, help=tensor)
    parser.add_argument(
        "--api-key", help="API key that clients must send (default: a random one, printed)"
    )
    parser.add_argument("--record", metavar="FILE", help="record every call in this SQLite file")
    drain = "seconds to finish running requests after Ctrl-C (default: %(default)g)"
    parser.add_argument("--drain-s", type=float, default=ServerConfig.drain_s, help=drain)


def run_serve(arguments: argparse.Namespace) -> int:
    """Serve a model over OpenAI's API and others. Stop with Ctrl-C."""
    try:
        config = _config(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    def announce(gateway: "Gateway") -> None:
        key = "" if arguments.api_key else f" with API key {gateway.api_key}"
        print(f"{gateway.model_name} answers at {gateway.url}/v1{key}", flush=True)

    try:
        local_path(arguments.model)  # a wrong one is told before JAX is imported

        from lightning_jax.cli.serve import serve

        serve(config, announce)
    except UserError as error:
        raise UserError(_with_flags(str(error)), reason=error.reason, key=error.key) from error
    return 0


def _config(arguments: argparse.Namespace) -> "ServerConfig":
    from lightning_jax.cli.config import ServerConfig
    from lightning_jax.engine.config import ServeConfig
    from lightning_jax.models.config import ModelConfig

    settings = {name: getattr(arguments, name) for name in SERVE_FLAGS}
    return ServerConfig(
        model=ModelConfig(
            name=arguments.model,
            dtype=arguments.dtype,
            activation_dtype=arguments.activation_dtype,
            chat_template=arguments.chat_template,
            chat_template_kwargs=arguments.chat_template_kwargs,
        ),
        serve=ServeConfig(**settings, api_key=arguments.api_key),
        record=arguments.record,
        drain_s=arguments.drain_s,
        tensor=arguments.tensor,
    )


def _with_flags(sentence: str) -> str:
    """Return the sentence with the flags of `serve` in place of the settings of a run."""
    return _SETTING.sub(lambda found: _FLAG_OF.get(found[1], found[0]), sentence)
