"""`lightning-jax new`: a directory with an example agent, tasks and settings to edit.

Nothing heavy is imported.
"""

import argparse
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import yaml

from lightning_jax.cli.command import Command, argument, flag
from lightning_jax.cli.runtime import installed_version
from lightning_jax.environments.gym import usable_levels
from lightning_jax.environments.small_files import write_tasks
from lightning_jax.errors import UserError

STARTER = Path(__file__).parents[1] / "starter"  # has a folder for each template

TEMPLATES = {
    "dates": "one call of the openai client; writes dates as YYYY-MM-DD",
    "tools": "a tool loop over the openai client; calculates with a tool",
    "roles": "a planner that trains and a worker that stays as it is",
    "langgraph": "a LangGraph agent that checks its reply and asks again",
    "gym": "one question of a reasoning-gym family; `--gym NAME` chooses the family",
    "command": "a program, in any language: reads the task on stdin, prints the reward",
    "claude-code": "Claude Code on generated file tasks, in a sandbox",
    "codex": "Codex on the same tasks",
    "gemini-cli": "Gemini CLI on the same tasks",
    "opencode": "OpenCode on the same tasks",
    "qwen-code": "Qwen Code on the same tasks",
}
# Packages that a template's agent imports and lightning_jax does not require.
NEEDED = {"langgraph": ("langgraph", "langchain-openai"), "gym": ("reasoning-gym",)}
NUM_TASKS = {"train": 60, "dev": 12}  # of a template whose config names a folder of tasks


class _ListAction(argparse.Action):
    """Flag that prints the templates and ends the command, as --help does."""

    def __call__(self, parser: argparse.ArgumentParser, *others: Any) -> None:
        for name, text in TEMPLATES.items():
            print(f"{name:<11} {text}")
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
        settings = yaml.safe_load((folder / "config.yaml").read_text())
        if settings["data"].get("root") == "tasks":
            for split, number in NUM_TASKS.items():
                write_tasks(folder / "tasks" / split, split, number, levels=3, seconds=600.0)
        for path in sorted(folder.iterdir()):
            print(path)
        program = shutil.which("lightning-jax")  # None if the command is not on PATH
        command = "lightning-jax" if program else f"{shlex.quote(sys.executable)} -m lightning_jax"
        print(f"\ncd {shlex.quote(str(folder))}")
        for line in _install_lines(template, settings["agent"].get("options", {})):
            print(line)
        print(f"{command} try     # the agent once: calls, tokens, reward\n{command} train")
        return 0


def _install_lines(template: str, options: Mapping[str, Any]) -> list[str]:
    """Return the commands that install what a template's agent needs and this system lacks."""
    missing = [name for name in NEEDED.get(template, ()) if installed_version(name) is None]
    lines = [f"pip install {shlex.join(missing)}"] if missing else []
    programs = options.get("programs", {})
    lines += [line for name, line in programs.items() if shutil.which(name) is None]
    return [f"{line}   # not installed here; the agent needs it" for line in lines]
