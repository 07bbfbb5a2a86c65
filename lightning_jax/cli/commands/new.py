"""`lightning-jax new`: a directory with an example agent, tasks and settings to edit.

Nothing heavy is imported.
"""

import argparse
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from lightning_jax.cli.catalog import WITHOUT_DEPENDENCIES, copy_template, find_environment
from lightning_jax.cli.command import Command, Index, UsageError, argument, flag
from lightning_jax.cli.runtime import installed_version
from lightning_jax.errors import UserError

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
    env: str | None = flag(
        "environment in place of a template, such as sums or gym:chain_sum; "
        "`lightning-jax envs` lists them",
        "NAME",
    )
    mcp: str | None = flag(
        "command of an MCP server in place of a template; a model drafts tasks for its tools",
        "COMMAND",
    )
    url: str | None = flag(
        "with --mcp: OpenAI-compatible server that drafts and judges (default: the policy); "
        "its key is in $OPENAI_API_KEY"
    )
    model: str | None = flag("with --mcp: model of that server, or the policy's", "NAME")
    drafts: Index = flag("with --mcp: drafts to try (default: %(default)s)", "N", default=48)
    show_list: None = flag(
        "list the templates and exit", name="--list", nargs=0, action=_ListAction
    )

    def run(self) -> int:
        folder = self.folder
        if folder.exists():
            raise UserError(
                f"{folder} already exists; pass a new directory.", reason="exists", key="DIR"
            )
        try:
            needed = self._write()
        except OSError as error:
            raise UserError(
                f"{folder} cannot be created ({error}); pass another path.",
                reason="not_created",
                key="DIR",
            ) from error
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            print(path)
        program = shutil.which("lightning-jax")  # None if the command is not on PATH
        command = "lightning-jax" if program else f"{shlex.quote(sys.executable)} -m lightning_jax"
        missing = [name for name in needed if installed_version(name) is None]
        print(f"\ncd {shlex.quote(str(folder))}")
        for option, names in (
            ("", [name for name in missing if name not in WITHOUT_DEPENDENCIES]),
            ("--no-deps ", [name for name in missing if name in WITHOUT_DEPENDENCIES]),
        ):
            if names:
                print(f"pip install {option}{shlex.join(names)}   # not installed; it needs them")
        print(f"{command} try     # the agent once: calls, tokens, reward")
        print(f"{command} eval    # the untrained score\n{command} train")
        return 0

    def _write(self) -> tuple[str, ...]:
        """Write the directory, and return the packages that it needs. Raises UserError."""
        sources = {
            "--template": self.template != "dates",
            "--env": self.env is not None,
            "--mcp": self.mcp is not None,
        }
        names = [name for name, is_set in sources.items() if is_set]
        if len(names) > 1:
            raise UsageError.conflict(names[1], f"{' and '.join(names)} are both set; drop one.")
        if self.mcp is None and (self.url or self.model):
            raise UsageError.conflict("--mcp", "--url and --model are for --mcp; add it.")
        if self.url and not self.model:
            raise UsageError.missing("--model", "--url is set without --model; add it.")
        if self.mcp is not None:
            from lightning_jax.cli.new_mcp import Drafts, create

            create(self.folder, Drafts(self.mcp, self.drafts, self.url, self.model))
        elif self.env is not None:
            choice = find_environment(self.env)
            choice.write(self.folder)
            return choice.environment.packages
        else:
            copy_template(self.template, self.folder)
        return NEEDED.get(self.template, ())
