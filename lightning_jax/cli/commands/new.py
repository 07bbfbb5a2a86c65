"""`lightning-jax new`: a directory with an example agent, tasks and settings to edit.

Nothing heavy is imported.
"""

import argparse
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import yaml

from lightning_jax.cli.catalog import WITHOUT_DEPENDENCIES, copy_template, find_environment
from lightning_jax.cli.command import Command, Index, UsageError, argument, flag
from lightning_jax.cli.runtime import installed_version
from lightning_jax.environments.small_files import write_tasks
from lightning_jax.errors import UserError

TEMPLATES = {
    "dates": "one call of the openai client; writes dates as YYYY-MM-DD",
    "tools": "a tool loop over the openai client; calculates with a tool",
    "roles": "a planner that trains and a worker that stays as it is",
    "langgraph": "a LangGraph agent that checks its reply and asks again",
    "command": "a program, in any language: reads the task on stdin, prints the reward",
    "claude-code": "Claude Code on generated file tasks, in a sandbox",
    "codex": "Codex on the same tasks",
    "gemini-cli": "Gemini CLI on the same tasks",
    "opencode": "OpenCode on the same tasks",
    "qwen-code": "Qwen Code on the same tasks",
}
# Packages that a template's agent imports and lightning_jax does not require.
NEEDED = {"langgraph": ("langgraph", "langchain-openai")}
TASKS = "tasks"  # folder of the generated tasks
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
        paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        for path in sorted(path for path in paths if path.parts[0] != TASKS):
            print(folder / path)
        program = shutil.which("lightning-jax")  # None if the command is not on PATH
        command = "lightning-jax" if program else f"{shlex.quote(sys.executable)} -m lightning_jax"
        print(f"\ncd {shlex.quote(str(folder))}")
        for line in _install_lines(needed, _settings(folder)["agent"].get("options", {})):
            print(f"{line}   # not installed here; the agent needs it")
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
            if _settings(self.folder)["data"].get("root") == TASKS:
                for split, number in NUM_TASKS.items():
                    write_tasks(self.folder / TASKS / split, split, number, levels=3, seconds=600.0)
        return NEEDED.get(self.template, ())


def _settings(folder: Path) -> dict[str, Any]:
    return yaml.safe_load((folder / "config.yaml").read_text())


def _install_lines(packages: Sequence[str], options: Mapping[str, Any]) -> list[str]:
    """Return the commands that install what an agent needs and this system lacks."""
    missing = [name for name in packages if installed_version(name) is None]
    alone = [name for name in missing if name in WITHOUT_DEPENDENCIES]
    others = [name for name in missing if name not in WITHOUT_DEPENDENCIES]
    lines = [f"pip install {shlex.join(others)}"] if others else []
    lines += [f"pip install --no-deps {shlex.join(alone)}"] if alone else []
    programs = options.get("programs", {})
    return lines + [line for name, line in programs.items() if shutil.which(name) is None]
