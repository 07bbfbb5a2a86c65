"""`lightning-jax envs`: environments that are ready, by name. Nothing heavy is imported."""

from dataclasses import dataclass
from typing import ClassVar

from lightning_jax.cli.catalog import ENVIRONMENTS, find_environment
from lightning_jax.cli.command import Command, argument
from lightning_jax.cli.runtime import installed_version
from lightning_jax.environments import gym

FAMILIES = "gym"  # environment whose arguments can be listed


@dataclass(frozen=True, kw_only=True)
class Envs(Command):
    """List the environments that are ready. `new DIR --env NAME` makes a directory that trains.

    `envs gym` lists the task families of reasoning-gym.
    """

    needs_jax: ClassVar[bool] = False
    name: str | None = argument("NAME", "environment whose members to list: gym", default=None)

    def run(self) -> int:
        if self.name == FAMILIES:
            lines = [(f"{FAMILIES}:{name}", text) for name, text in gym.descriptions().items()]
        elif self.name is None:
            lines = [(_usage(name), _line(name)) for name in ENVIRONMENTS]
            lines.append(
                ("--mcp 'COMMAND'", "the tools of an MCP server, with tasks that a model drafts")
            )
        else:
            find_environment(self.name)
            lines = [(self.name, _line(self.name))]
        width = max(len(usage) for usage, _ in lines)
        for usage, text in lines:
            print(f"{usage:<{width}}  {text}".rstrip())
        if self.name is None:
            print("\nlightning-jax new DIR --env NAME   # makes a directory that trains")
        return 0


def _usage(name: str) -> str:
    environment = ENVIRONMENTS[name]
    return f"{name}:{environment.argument}" if environment.argument else name


def _line(name: str) -> str:
    environment = ENVIRONMENTS[name]
    missing = [package for package in environment.packages if installed_version(package) is None]
    return environment.text + (f" (not installed: {', '.join(missing)})" if missing else "")
