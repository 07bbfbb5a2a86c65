"""`lightning-jax new`: a directory with an example agent, tasks and settings to edit.

Nothing heavy is imported.
"""

import argparse
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from lightning_jax.cli.command import Command, argument, flag
from lightning_jax.cli.runtime import installed_version
from lightning_jax.environments.gym import usable_levels
from lightning_jax.errors import UserError

STARTER = Path(__file__).parents[1] / "starter"  # has a folder for each template

TEMPLATES = {
    "dates": "one call of the openai client; writes dates as YYYY-MM-DD",
    "tools": "a tool loop over the openai client; calculates with a tool",
    "roles": "a planner that trains and a worker that stays as it is",
    "langgraph": "a LangGraph agent that checks its reply and asks again",
    "gym": "one question of a reasoning-gym family; `--gym NAME` chooses the family",
    "command": "a program, in any language: reads the task on stdin, prints the reward",
}
# Packages that a template's agent imports and lightning_jax does not require.
NEEDED = {"langgraph": ("langgraph", "langchain-openai"), "gym": ("reasoning-gym",)}


class _ListAction(argparse.Action):
    """Flag that prints the templates and ends the command, as --help does."""

    def __call__(self, parser: argparse.ArgumentParser, *others: Any) -> None:
        for name, text in TEMPLATES.items():
            print(f"{name:<10} {text}")
        parser.exit()


@dataclass(frozen=True, kw_only=True)
class New(Command):
    """Create a directory with an example agent, tasks and settings to edit."""

    needs_jax: ClassVar[bool] = False
    folder: Path = argument("DIR", "what to make")
    template: str = flag(
        "example to start from (default: %(default)s)", default="dates", choices=tuple(TEMPLATES)
    )
    gym: str | None = flag(
        "task family of reasoning-gym, such as chain_sum, with the template gym", "NAME"
    )
    show_list: None = flag(
        "list the templates and exit", name="--list", nargs=0, action=_ListAction
    )

    def run(self) -> int:
        folder = self.folder
        if folder.exists():
            raise UserError(
                f"{folder} already exists; pass a new directory.", reason="exists", key="DIR"
            )
        template = "gym" if self.gym else self.template
        levels = usable_levels(self.gym) if self.gym else []
        if self.gym and not levels:
            raise UserError(
                f"{self.gym} makes no tasks at its first levels; choose another family.",
                reason="unusable",
                key=self.gym,
            )
        source = STARTER / template
        try:
            shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__"))
        except OSError as error:
            raise UserError(
                f"{folder} cannot be created ({error}); pass another path.",
                reason="not_created",
                key="DIR",
            ) from error
        if self.gym:
            config = folder / "config.yaml"
            text = re.sub("family: .*", f"family: {self.gym}", config.read_text())
            config.write_text(re.sub(r"levels: \[.*?\]", f"levels: {levels}", text))
        for path in sorted(folder.iterdir()):
            print(path)
        program = shutil.which("lightning-jax")  # None if the command is not on PATH
        command = "lightning-jax" if program else f"{shlex.quote(sys.executable)} -m lightning_jax"
        needed = NEEDED.get(template, ())
        missing = [name for name in needed if installed_version(name) is None]
        print(f"\ncd {shlex.quote(str(folder))}")
        if missing:
            print(
                f"pip install {shlex.join(missing)}   # not installed here; the agent imports them"
            )
        print(f"{command} try     # the agent once: calls, tokens, reward\n{command} train")
        return 0
