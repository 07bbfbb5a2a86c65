"""Command line of `lightning-jax`.

Importing JAX takes seconds, and neither --help nor a wrong flag needs it. Each command therefore
imports its own modules.
"""

import argparse
import difflib
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from lightning_jax.cli import troubleshooting
from lightning_jax.cli.config_command import add_config, run_config
from lightning_jax.cli.new import add_new, run_new
from lightning_jax.cli.runs import (
    add_compare,
    add_rescore,
    add_runs,
    run_compare,
    run_rescore,
    run_runs,
)
from lightning_jax.cli.runtime import (
    STOPPED,
    Index,
    Limit,
    Positive,
    add_settings,
    installed_version,
    is_closed_output,
    is_unwritable,
    keep_compiled,
    lack_of_memory,
    number_of,
    parse,
    settings_layers,
    stop_on_sigterm,
)
from lightning_jax.cli.serve_command import add_serve, run_serve
from lightning_jax.cli.sft import add_sft, run_sft
from lightning_jax.cli.studio import add_studio, run_studio
from lightning_jax.cli.without_training import add_eval, add_try, run_eval, run_try
from lightning_jax.cli.worker import add_worker, run_worker
from lightning_jax.errors import UserError
from lightning_jax.studio import DEFAULT_CHARS, DEFAULT_LIMIT
from lightning_jax.system.logs import log_plainly
from lightning_jax.system.process_state import kept_process
from lightning_jax.system.text import with_marked_lines
from lightning_jax.types import PHASES

TROUBLESHOOTING = "troubleshooting"  # topic of `help`
# A word of the command line in argparse's message.
_MISSPELLED = re.compile(r"invalid choice: '(\S*?)'|unrecognized arguments: (--[\w-]+)")


class _Parser(argparse.ArgumentParser):
    """Parser that reports an error in one sentence, without the usage text.

    A misspelled command or flag is answered with the one that is meant. `add_flags` adds the flags
    of a command when they are needed, because defaults of some are settings, which pydantic checks.
    """

    add_flags: Callable[[argparse.ArgumentParser], None] | None = None

    def complete(self) -> None:
        """Add the flags unless they are there."""
        add_flags, self.add_flags = self.add_flags, None
        if add_flags is not None:
            add_flags(self)

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        self.complete()
        return super().parse_known_args(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        known = [name for action in self._actions for name in action.option_strings]
        for action in self._actions:
            known += map(str, action.choices or ())
        found = _MISSPELLED.search(message)
        close = difflib.get_close_matches(found[1] or found[2], known, 1) if found else []
        if close:
            message = f"{message.split(' (choose from')[0]}; did you mean {close[0]}?"
            self.exit(2, f"error: {message} {self.prog} --help lists all.\n")
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    A user error prints one sentence and returns 1 or 2.
    """
    try:
        arguments = parse(_parser(), argv)
    except SystemExit as left:  # argparse has printed a help text or an error
        return int(left.code or 0)
    try:
        log_plainly()
        if arguments.run not in WITHOUT_JAX:
            keep_compiled()
        code = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except UserError as error:
        return _fail(f"error: {error}", 1)
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
        _fail(STOPPED if arguments.run is _train else "stopped", 130)
        # After an interrupted compilation, JAX crashes at interpreter exit.
        os._exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="lightning-jax", description="Train an agent, or serve a model.")
    parser.add_argument("--version", action="version", version=_versions())
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, text, add_flags, run in (
        ("new", "create a directory with an example agent and tasks", add_new, run_new),
        ("try", "run the agent on one task and show the rollout", add_try, run_try),
        ("train", "train an agent on your own tasks", _add_train, _train),
        ("eval", "score a policy on tasks without training", add_eval, run_eval),
        ("worker", "run the agent for a run on another machine", add_worker, run_worker),
        ("serve", "serve a model over OpenAI's API and others", add_serve, run_serve),
        ("verify", "check a run's log-probs against its weights", _add_verify, _verify),
        ("view", "show a run's rollouts, or the timeline of one", _add_view, _view),
        ("studio", "serve a page that shows runs as they train", add_studio, run_studio),
        ("runs", "list runs with status, rewards and failures", add_runs, run_runs),
        ("compare", "compare runs: settings, curves, tasks won and lost", add_compare, run_compare),
        ("plan", "report the memory that a run needs on each device", _add_plan, _plan),
        ("sft", "train on the best attempts of a run", add_sft, run_sft),
        ("rescore", "score a run's rollouts by other rewards", add_rescore, run_rescore),
        ("config", "print, search or check settings of a run", add_config, run_config),
        ("help", "show the help of a command, or what to do about a run", _add_help, _help),
    ):
        command = commands.add_parser(name, help=text, description=run.__doc__)
        command.set_defaults(run=run, parser=command)  # error messages point to its --help
        command.add_flags = add_flags
    return parser


def _versions() -> str:
    names = ("lightning-jax", "jax", "jaxlib")
    found = {name: installed_version(name) for name in names}
    # A clone on PYTHONPATH is not installed.
    return ", ".join(f"{name} {found[name] or '(not installed)'}" for name in names)


def _add_train(parser: argparse.ArgumentParser) -> None:
    add_settings(parser)
    page = "show the live page of `studio` at / of the run's server; the log has its URL and key"
    parser.add_argument("--studio", action="store_true", help=page)


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="a run directory")
    limit = "maximum number of calls to compare, evenly spaced (default: all)"
    parser.add_argument("--limit", type=number_of(Limit), help=limit)
    tolerance = "maximum difference of a log-prob in nats (default: 0.001, 1 for bfloat16)"
    parser.add_argument("--tolerance", type=number_of(Positive), help=tolerance)


def _add_view(parser: argparse.ArgumentParser) -> None:
    run = "a run directory, or a file of `try --record`"
    parser.add_argument("run_dir", metavar="RUN", type=Path, help=run)
    rollout = "rollout to show (default: a table of all)"
    parser.add_argument("rollout_id", metavar="ROLLOUT", nargs="?", help=rollout)
    parser.add_argument("--phase", choices=PHASES, help="only rollouts of this phase")
    parser.add_argument("--step", type=number_of(Index), help="only rollouts of this step")
    limit = "maximum number of rollouts (default: %(default)s)"
    parser.add_argument("--limit", type=number_of(Limit), default=DEFAULT_LIMIT, help=limit)
    chars = "maximum number of characters per text, 0 for no limit (default: %(default)s)"
    parser.add_argument("--chars", type=number_of(Index), default=DEFAULT_CHARS, help=chars)
    page = "write a self-contained HTML page with the details of all rollouts"
    parser.add_argument("--html", metavar="FILE", type=Path, help=page)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    add_settings(parser)
    devices = "number of simulated devices (default: the devices of this machine)"
    parser.add_argument("--devices", type=number_of(Limit), metavar="N", help=devices)
    absent = "plan for other hardware, such as h100:8 or v5e:2x4 (needs its compiler)"
    parser.add_argument("--target", metavar="NAME", help=absent)
    memory = "memory of a device in GiB (default: as reported by this machine)"
    parser.add_argument("--device-gib", type=number_of(Positive), metavar="GIB", help=memory)
    quick = "estimate a step's memory from shapes instead of compiling it"
    parser.add_argument("--quick", action="store_true", help=quick)


def _add_help(parser: argparse.ArgumentParser) -> None:
    topic = f"a command, or: {TROUBLESHOOTING} (default: the list of commands)"
    parser.add_argument("topic", metavar="TOPIC", nargs="?", help=topic)


def _help(arguments: argparse.Namespace) -> int:
    """Show the help of a command, or with `troubleshooting` what to do if a run does not learn."""
    if arguments.topic != TROUBLESHOOTING:
        return main([arguments.topic, "--help"] if arguments.topic else ["--help"])
    print(troubleshooting.as_text())
    return 0


def _train(arguments: argparse.Namespace) -> int:
    """Train the agent that the settings name on the tasks of data.root or data.load.

    data.root is a file with one JSON object per line, or a directory with train.jsonl and
    dev.jsonl. data.load is FILE:FUNCTION. The exit code is 1 if no step changed the weights.
    """
    from lightning_jax.settings import load_config
    from lightning_jax.train.check import check_start
    from lightning_jax.train.config import Config
    from lightning_jax.train.data import load_tasks
    from lightning_jax.train.directory import with_fixed_paths

    stop_on_sigterm()
    layers = settings_layers(arguments)
    config = load_config(Config, layers)
    check_start(config)
    if config.cluster.trainers:
        from lightning_jax.cli.train_in_cluster import train_in_cluster

        return train_in_cluster(config, layers, has_page=arguments.studio)
    with kept_process():  # loaders and agents may change the directory
        fixed = with_fixed_paths(config)
        tasks = load_tasks(fixed)

        from lightning_jax.cli.train import train_and_report  # imports JAX, after the checks

        return train_and_report(
            fixed, *tasks, has_page=arguments.studio, shown=Path(config.run_dir)
        )


def _plan(arguments: argparse.Namespace) -> int:
    """Report how much memory a run needs on each device.

    Compiles the training step without allocating. The exit code is 1 if a device is too small.
    """
    from lightning_jax.settings import load_config
    from lightning_jax.train.check import check_model
    from lightning_jax.train.config import Config

    if arguments.devices is not None and arguments.target is not None:
        return _fail("error: --devices and --target are both set; choose one.", 2)
    config = load_config(Config, settings_layers(arguments))
    check_model(config)

    from lightning_jax.train.memory import plan  # imports JAX, after the checks
    from lightning_jax.train.memory.targets import target_devices

    capacity = devices = limit = None
    if arguments.target is not None:
        devices, capacity = target_devices(arguments.target)
    elif arguments.devices is not None:
        plan.simulate_devices(arguments.devices)
    else:
        capacity, limit = plan.device_capacity(), plan.process_limit()
    config, model = plan.resolve_shape(config, devices[0].platform if devices else None)
    if arguments.device_gib is not None:
        capacity = int(arguments.device_gib * plan.GIB)
    make = plan.make_plan if arguments.quick else plan.compile_plan
    made = make(model, config, capacity, devices, limit=limit)
    print(plan.as_table(made))
    plan.check_plan(made)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    """Recompute the log-probs of a run's stored calls with the weights that sampled them.

    The exit code is 1 if any differs.
    """
    from lightning_jax.train.directory import SETTINGS, STORE, require_run

    require_run(arguments.run_dir, SETTINGS, STORE)

    from lightning_jax.cli.verify import as_text, verify  # imports JAX, after the check

    found = verify(arguments.run_dir, limit=arguments.limit, tolerance=arguments.tolerance)
    print(as_text(found))
    return 1 if found.off else 0


def _view(arguments: argparse.Namespace) -> int:
    """Show a run's rollouts as a table, newest step first, or one rollout as a waterfall.

    The waterfall has agent, LLM and tool spans with prompts, responses, credit and advantages.
    """
    from lightning_jax.studio.command import show

    if arguments.rollout_id and (arguments.phase or arguments.step is not None):
        return _fail(
            "error: --phase and --step cannot be combined with a rollout; drop one of them.", 2
        )
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


WITHOUT_JAX = (run_new, run_config, run_runs, run_compare, run_studio, run_worker, _view, _help)


def _fail(message: str, code: int) -> int:
    print(with_marked_lines(message), file=sys.stderr)
    return code
