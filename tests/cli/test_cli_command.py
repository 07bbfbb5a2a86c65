"""Tests that the fields of a command become its arguments."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from lightning_jax.cli.command import (
    AtLeastOne,
    Command,
    Parser,
    SettingsCommand,
    argument,
    flag,
)
from lightning_jax.cli.main import COMMANDS, command_of, parse


@dataclass(frozen=True, kw_only=True)
class Example(SettingsCommand):
    """Do nothing."""

    folder: Path | None = flag("a folder", "DIR", name="--in")
    num_tries: AtLeastOne = flag("tries (default: %(default)s)", default=1)
    axis: Literal["x", "y"] = flag("an axis", default="x")
    is_quick: bool = flag("do less", name="--quick", default=False)

    def run(self) -> int:
        return 0


@dataclass(frozen=True, kw_only=True)
class Names(Command):
    """Do nothing with names."""

    first: str = argument("FIRST", "a name")
    others: list[str] = argument("OTHER", "more names")

    def run(self) -> int:
        return 0


def read(command: type[Command], *words: str) -> Command:
    parser = Parser(prog="example")
    command.add_to(parser)
    return command(**vars(parser.parse_intermixed_args(words)))


def test_fields_have_the_types_and_defaults_of_the_class() -> None:
    assert read(Example) == Example()
    example = read(Example, "--in", "a/b", "--num-tries", "2", "--axis", "y", "--quick")
    assert example == Example(folder=Path("a/b"), num_tries=2, axis="y", is_quick=True)


def test_settings_stand_on_both_sides_of_flags() -> None:
    command = parse(["train", "a=1", "--config", "own.yaml", "b=2"])
    assert isinstance(command, SettingsCommand)
    assert command.layers() == ["own.yaml", "a=1", "b=2"]


@pytest.mark.parametrize(
    ("command", "words", "name"),
    [
        (Example, ["--num-tries", "0"], "--num-tries"),
        (Example, ["--axis", "z"], "--axis"),
        (Example, ["--axes", "y"], "--axis"),
        (Names, ["one"], "OTHER"),
    ],
)
def test_a_wrong_argument_is_named(
    command: type[Command], words: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        read(command, *words)
    assert caught.value.code == 2 and name in capsys.readouterr().err


def test_every_command_is_a_class_with_a_description() -> None:
    classes = [command_of(name) for name in COMMANDS]
    assert len(set(classes)) == len(COMMANDS)
    assert all(command.__doc__ and issubclass(command, Command) for command in classes)
