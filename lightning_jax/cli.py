"""Command line of `lightning-jax`.

Importing JAX takes seconds, and neither --help nor a wrong flag needs it. Each command therefore
imports its own modules.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from lightning_jax.command_line import (
    STOPPED,
    add_settings,
    is_place_closed,
    log_plainly,
    parse,
    stop_on_sigterm,
)
from lightning_jax.config_sections import ModelConfig, ServeConfig, ServerConfig
from lightning_jax.view import DEFAULT_CHARS, DEFAULT_LIMIT

if TYPE_CHECKING:
    from lightning_jax.gateway.app import Gateway

STARTER = Path(__file__).parent / "starter"  # folder that `new` copies

# Flags of `serve` that set fields of ServeConfig. Their defaults are defined there.
SERVE_FLAGS = {
    "host": "address to listen on",
    "port": "port to listen on, 0 for any free one",
    "slots": "requests answered at once; of several GPUs or TPUs, by each",
    "max_len": "tokens of prompt and response together",
    "max_queue": "requests that may wait for a slot; more get a 429",
    "max_connections": "connections at once; one more closes an idle one",
    "idle_connection_s": "seconds until a connection without a request is closed",
    "slow_request_s": "seconds for a request to arrive whole; a slower one gets a 408",
}


class _Parser(argparse.ArgumentParser):
    """Parser that reports an error in one sentence, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    A user error prints one sentence and returns 1 or 2.
    """
    arguments = parse(_parser(), argv)
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        _fail(arguments.stopped, 130)
        # After an interrupted compilation, JAX crashes at interpreter exit.
        os._exit(130)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.run is _new:  # only copies files, without JAX
        return _new(arguments)
    from lightning_jax.compiled import keep_compiled
    from lightning_jax.types import UserError

    log_plainly()
    keep_compiled()
    try:
        return arguments.run(arguments)
    except UserError as error:
        return _fail(f"error: {error}", 1)
    except OSError as error:
        if not is_place_closed(error):
            raise
        return _fail(f"error: {error}; free or open the place, then try again.", 1)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="lightning-jax", description="Train an agent, or serve a model.")
    parser.set_defaults(stopped="stopped")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_new(commands.add_parser("new", help="make a folder with an agent and tasks to begin with"))
    _add_train(commands.add_parser("train", help="train an agent on tasks of your own"))
    _add_serve(commands.add_parser("serve", help="answer OpenAI's API, and others, with a model"))
    _add_verify(commands.add_parser("verify", help="check a run's calls against its weights"))
    _add_view(commands.add_parser("view", help="show a run's rollouts, or one of them in time"))
    _add_plan(commands.add_parser("plan", help="what a run will hold in each device's memory"))
    for command in commands.choices.values():
        command.set_defaults(parser=command)  # error messages point to its --help
    return parser


def _add_new(parser: argparse.ArgumentParser) -> None:
    parser.description = "Makes a folder with an agent, its tasks and settings, all to be changed."
    parser.add_argument("folder", metavar="DIR", type=Path, help="what to make")
    parser.set_defaults(run=_new)


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Trains the agent that the settings name on the tasks of data.root: a file of JSON "
        "objects, one a line, or a folder with train.jsonl and dev.jsonl."
    )
    add_settings(parser)
    parser.set_defaults(run=_train, stopped=STOPPED)


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.description = "Answers OpenAI's API, and others, with a model. Ctrl-C ends it."
    model = "Hugging Face directory or hub id, .gguf file, or smollm2-135m-instruct"
    dtype = "of weights and activations: float32, bfloat16, or auto for the fastest here"
    parser.add_argument("--model", default=ModelConfig.name, help=f"{model} (default: %(default)s)")
    parser.add_argument(
        "--dtype", default=ModelConfig.dtype, help=f"{dtype} (default: %(default)s)"
    )
    parser.add_argument(
        "--activation-dtype",
        metavar="float32",
        help="of activations beside bfloat16 weights, for a CPU (default: that of the weights)",
    )
    defaults = {field.name: field.default for field in fields(ServeConfig)}
    for name, text in SERVE_FLAGS.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(defaults[name]),
            default=defaults[name],
            help=f"{text} (default: %(default)s)",
        )
    tensor = "GPUs or TPUs that share a copy of the model; the others hold copies (default: 1)"
    parser.add_argument("--tensor", type=int, default=ServerConfig.tensor, help=tensor)
    parser.add_argument("--api-key", help="what clients must send (default: a random one, printed)")
    parser.add_argument("--record", metavar="FILE", help="keep every call in this SQLite file")
    drain = "seconds that running requests get after Ctrl-C (default: %(default)g)"
    parser.add_argument("--drain-s", type=float, default=ServerConfig.drain_s, help=drain)
    parser.set_defaults(run=_serve)


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Computes the log-probs of a run's stored calls anew, each from the weights that sampled "
        "it. Exit code 1 if one is off."
    )
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="a run directory")
    limit = "calls to compare, spread evenly (default: all)"
    parser.add_argument("--limit", type=int, help=limit)
    tolerance = "nats that a log-prob may be off (default: 0.001, 1 for bfloat16)"
    parser.add_argument("--tolerance", type=float, help=tolerance)
    parser.set_defaults(run=_verify)


def _add_view(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Shows a table of a run's rollouts, newest step first; or one rollout as a waterfall of "
        "its agent, LLM and tool spans, with prompts, responses, credit and advantages."
    )
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="a run directory")
    rollout = "show this one (default: a table of them)"
    parser.add_argument("rollout_id", metavar="ROLLOUT", nargs="?", help=rollout)
    parser.add_argument("--phase", choices=("train", "eval"), help="only rollouts of this phase")
    parser.add_argument("--step", type=int, help="only rollouts of this step")
    limit = "rollouts to show at most (default: %(default)s)"
    parser.add_argument("--limit", type=int, default=DEFAULT_LIMIT, help=limit)
    chars = "characters of one text to print, 0 for all (default: %(default)s)"
    parser.add_argument("--chars", type=int, default=DEFAULT_CHARS, help=chars)
    page = "write a page that needs no network, with all rollouts shown in detail"
    parser.add_argument("--html", metavar="FILE", type=Path, help=page)
    parser.set_defaults(run=_view)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Says what a run would hold in the memory of each device. Compiles its training step and "
        "allocates nothing. Exit code 1 if a device is too small."
    )
    add_settings(parser)
    devices = "plan for so many simulated devices (default: those of this machine)"
    parser.add_argument("--devices", type=int, metavar="N", help=devices)
    absent = "plan for devices that are not here: h100:8, v5e:2x4 (needs their compiler)"
    parser.add_argument("--target", metavar="NAME", help=absent)
    memory = "GiB that a device has (default: what the devices of this machine say)"
    parser.add_argument("--device-gib", type=float, metavar="GIB", help=memory)
    quick = "estimate what a step needs from shapes instead of compiling it"
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.set_defaults(run=_plan)


def _new(arguments: argparse.Namespace) -> int:
    folder = arguments.folder
    if folder.exists():
        return _fail(f"error: {folder} is there already; expected a new folder. Choose another.", 1)
    try:
        shutil.copytree(STARTER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    except OSError as error:
        return _fail(f"error: {folder} cannot be made ({error}); choose another place.", 1)
    for path in sorted(folder.iterdir()):
        print(path)
    found = shutil.which("lightning-jax")  # None if the command is not on PATH
    command = "lightning-jax" if found else f"{sys.executable} -m lightning_jax"
    print(f"\ncd {folder} && {command} train --config config.yaml")
    return 0


def _train(arguments: argparse.Namespace) -> int:
    from lightning_jax.config import Config, load_config
    from lightning_jax.datasets.task_files import load_task_files
    from lightning_jax.experiment import load_splits, train_and_report

    stop_on_sigterm()
    config = load_config(Config, [arguments.config, *arguments.settings])
    train_and_report(config, *load_splits(config, load_task_files))
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    from lightning_jax import plan
    from lightning_jax.config import Config, load_config
    from lightning_jax.targets import target_devices

    for flag in ("devices", "device_gib"):
        value = getattr(arguments, flag)
        if value is not None and not value > 0:
            name = "--" + flag.replace("_", "-")
            return _fail(f"error: {name} is {value:g}; expected above 0.", 2)
    if arguments.devices is not None and arguments.target is not None:
        return _fail("error: --devices and --target are both set; choose one.", 2)
    config = load_config(Config, [arguments.config, *arguments.settings])
    capacity = devices = None
    if arguments.target is not None:
        devices, capacity = target_devices(arguments.target)
    elif arguments.devices is not None:
        plan.simulate_devices(arguments.devices)
    elif arguments.device_gib is None:
        capacity = plan.device_capacity()
    config, model = plan.resolve_shape(config, devices[0].platform if devices else None)
    if arguments.device_gib is not None:
        capacity = int(arguments.device_gib * plan.GIB)
    make = plan.make_plan if arguments.quick else plan.compile_plan
    made = make(model, config, capacity, devices)
    print(plan.as_table(made))
    plan.check_plan(made)
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    settings = {name: getattr(arguments, name) for name in SERVE_FLAGS}
    try:
        config = ServerConfig(
            model=ModelConfig(
                name=arguments.model,
                dtype=arguments.dtype,
                activation_dtype=arguments.activation_dtype,
            ),
            serve=ServeConfig(**settings, api_key=arguments.api_key),
            record=arguments.record,
            drain_s=arguments.drain_s,
            tensor=arguments.tensor,
        )
    except ValueError as error:
        return _fail(f"error: {error}", 2)

    def announce(gateway: "Gateway") -> None:
        key = "" if arguments.api_key else f" with API key {gateway.api_key}"
        print(f"{gateway.model_name} answers at {gateway.url}/v1{key}", flush=True)

    from lightning_jax.server import serve

    serve(config, announce)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from lightning_jax.verify import as_text, verify

    if arguments.limit is not None and arguments.limit < 1:
        return _fail(f"error: --limit is {arguments.limit}; expected at least 1.", 2)
    if arguments.tolerance is not None and not arguments.tolerance > 0:
        return _fail(f"error: --tolerance is {arguments.tolerance:g}; expected above 0 nats.", 2)
    found = verify(arguments.run_dir, limit=arguments.limit, tolerance=arguments.tolerance)
    print(as_text(found))
    return 1 if found.off else 0


def _view(arguments: argparse.Namespace) -> int:
    from lightning_jax.view.command import show

    for flag, lowest in (("step", 0), ("limit", 1), ("chars", 0)):
        value = getattr(arguments, flag)
        if value is not None and not lowest <= value < 2**31:
            return _fail(f"error: --{flag} is {value}; expected {lowest} to {2**31 - 1}.", 2)
    if arguments.rollout_id and (arguments.phase or arguments.step is not None):
        return _fail("error: --phase and --step choose among rollouts; name one, or choose.", 2)
    show(
        arguments.run_dir,
        arguments.rollout_id,
        phase=arguments.phase,
        step=arguments.step,
        limit=arguments.limit,
        chars=arguments.chars,
        html=arguments.html,
    )
    return 0


def _fail(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code
