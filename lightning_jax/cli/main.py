"""Command line of `lightning-jax`.

Importing JAX takes seconds, and neither --help nor a wrong flag needs it. The module of a command
is imported when the command is called, and imports JAX when it runs.
"""

import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from lightning_jax.cli.command import Command, Parser, UsageError
from lightning_jax.cli.runtime import (
    STOPPED,
    installed_version,
    is_closed_output,
    is_unwritable,
    keep_compiled,
    lack_of_memory,
)
from lightning_jax.errors import UserError
from lightning_jax.system.text import log_plainly, with_marked_lines

# Commands with module, class and a line for the list of commands.
COMMANDS = {
    "new": ("new", "New", "create a directory with an example agent and tasks"),
    "envs": ("envs", "Envs", "list the environments that `new --env` makes a directory of"),
    "try": ("without_training", "Try", "run the agent on one task and show the rollout"),
    "train": ("train", "Train", "train an agent on your own tasks"),
    "eval": ("without_training", "Eval", "score a policy on tasks without training"),
    "worker": ("worker", "Worker", "run the agent for a run on another machine"),
    "serve": ("serve", "Serve", "serve a model over OpenAI's API and others"),
    "verify": ("runs", "Verify", "check a run's log-probs against its weights"),
    "view": ("runs", "View", "show a run's rollouts, or the timeline of one"),
    "studio": ("studio", "Studio", "serve a page that shows runs as they train"),
    "runs": ("runs", "Runs", "list runs with status, rewards and failures"),
    "compare": ("runs", "Compare", "compare runs: settings, curves, tasks won and lost"),
    "plan": ("train", "Plan", "report the memory that a run needs on each device"),
    "learn": ("learn", "Learn", "train on the stored attempts of a run"),
    "rescore": ("runs", "Rescore", "score a run's rollouts by other rewards"),
    "config": ("help", "ShowConfig", "print, search or check settings of a run"),
    "help": ("help", "Help", "show the help of a command, or what to do about a run"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    A user error prints one sentence and returns 1 or 2.
    """
    try:
        command = parse(sys.argv[1:] if argv is None else argv)
    except SystemExit as end:  # argparse has printed a help text or an error
        return int(end.code or 0)
    try:
        log_plainly()
        if command.needs_jax:
            keep_compiled()
        code = command.run()
        sys.stdout.flush()
        return code
    except UserError as error:
        return _fail(f"error: {error}", 2 if isinstance(error, UsageError) else 1)
    except OSError as error:
        if is_closed_output(error):
            return 128 + signal.SIGPIPE
        if not is_unwritable(error):
            raise
        return _fail(f"error: {error}; free disk space or fix permissions, then try again.", 1)
    except Exception as error:
        if (sentence := lack_of_memory(error)) is None:
            raise
        return _fail(f"error: {sentence}", 1)
    except KeyboardInterrupt:
        _fail(
            STOPPED
            if isinstance(command, (command_of("train"), command_of("learn")))
            else "stopped",
            130,
        )
        # After an interrupted compilation, JAX crashes at interpreter exit.
        os._exit(130)


def parse(argv: Sequence[str]) -> Command:
    """Return the command of a command line. Settings may stand on both sides of flags.

    Raises SystemExit for a mistake, and after printing a help text.
    """
    parser = Parser(prog="lightning-jax", description="Train an agent, or serve a model.")
    names = ("lightning-jax", "jax", "jaxlib")  # a clone on PYTHONPATH is not installed
    versions = [f"{name} {installed_version(name) or '(not installed)'}" for name in names]
    parser.add_argument("--version", action="version", version=", ".join(versions))
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, (_, _, text) in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    parser.parse_args(argv[:1])
    arguments = parser_of(argv[0]).parse_intermixed_args(argv[1:])
    return command_of(argv[0])(**vars(arguments))


def parser_of(name: str) -> Parser:
    """Return the parser of a command's arguments."""
    parser = Parser(prog=f"lightning-jax {name}")
    command_of(name).add_to(parser)
    return parser


def command_of(name: str) -> type[Command]:
    """Import a command."""
    module, attribute, _ = COMMANDS[name]
    return getattr(import_module(f"lightning_jax.cli.commands.{module}"), attribute)


def _fail(message: str, code: int) -> int:
    print(with_marked_lines(message), file=sys.stderr)
    return code
