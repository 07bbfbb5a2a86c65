"""`lightning-jax new`: a directory with an example agent, tasks and settings to edit.

Nothing heavy is imported.
"""

import argparse
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_jax.cli.runtime import installed_version
from lightning_jax.errors import UserError

STARTER = Path(__file__).parent / "starter"  # has a folder for each template

TEMPLATES = {
    "dates": "one call of the openai client; writes dates as YYYY-MM-DD",
    "tools": "a tool loop over the openai client; calculates with a tool",
    "roles": "a planner that trains and a worker that stays as it is",
    "langgraph": "a LangGraph agent that checks its reply and asks again",
    "command": "a program, in any language: reads the task on stdin, prints the reward",
}
# Packages that a template's agent imports and lightning_jax does not require.
NEEDED = {"langgraph": ("langgraph", "langchain-openai")}


class _ListAction(argparse.Action):
    """Flag that prints the templates and ends the command, as --help does."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        for name, text in TEMPLATES.items():
            print(f"{name:<10} {text}")
        parser.exit()


def add_new(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, help="what to make")
    template = "example to start from (default: %(default)s)"
    parser.add_argument("--template", choices=TEMPLATES, default="dates", help=template)
    parser.add_argument("--list", nargs=0, action=_ListAction, help="list the templates and exit")


def run_new(arguments: argparse.Namespace) -> int:
    """Create a directory with an example agent, tasks and settings to edit."""
    folder = arguments.folder
    if folder.exists():
        raise UserError(
            f"{folder} already exists; pass a new directory.", reason="exists", key="DIR"
        )
    source = STARTER / arguments.template
    try:
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__"))
    except OSError as error:
        raise UserError(
            f"{folder} cannot be created ({error}); pass another path.",
            reason="not_created",
            key="DIR",
        ) from error
    for path in sorted(folder.iterdir()):
        print(path)
    found = shutil.which("lightning-jax")  # None if the command is not on PATH
    command = "lightning-jax" if found else f"{sys.executable} -m lightning_jax"
    needed = NEEDED.get(arguments.template, ())
    missing = [name for name in needed if installed_version(name) is None]
    print(f"\ncd {shlex.quote(str(folder))}")
    if missing:
        print(f"pip install {' '.join(missing)}   # not installed here; the agent imports them")
    print(f"{command} try     # the agent once: calls, tokens, reward\n{command} train")
    return 0
