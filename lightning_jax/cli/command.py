"""Commands of `lightning-jax`. Each is a class, and its fields are its arguments.

Imports nothing heavy.
"""

import argparse
import difflib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    NoReturn,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import Ge, Le

from lightning_jax.errors import UserError

if TYPE_CHECKING:
    from lightning_jax.train.config import Config

Index = Annotated[int, Ge(0), Le(2**31 - 1)]
AtLeastOne = Annotated[int, Ge(1), Le(2**31 - 1)]
Port = Annotated[int, Ge(0), Le(65535)]

# A word of the command line in argparse's message.
_MISSPELLED = re.compile(r"invalid choice: '(\S*?)'|unrecognized arguments: (--[\w-]+)")


class UsageError(UserError):
    """Error of arguments that do not fit together."""


class Parser(argparse.ArgumentParser):
    """Parser that reports an error in one sentence, without the usage text.

    A misspelled command or flag is answered with the one that is meant.
    """

    def error(self, message: str) -> NoReturn:
        words = [name for action in self._actions for name in action.option_strings]
        for action in self._actions:
            words += map(str, action.choices or ())
        match = _MISSPELLED.search(message)
        close = difflib.get_close_matches(match[1] or match[2], words, 1) if match else []
        if close:
            message = f"{message.split(' (choose from')[0]}; did you mean {close[0]}?"
            self.exit(2, f"error: {message} {self.prog} --help lists all.\n")
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


def argument(metavar: str, text: str, **options: Any) -> Any:
    """Return a field for a positional argument. `options` are those of `dataclasses.field`."""
    return field(metadata={"metavar": metavar, "help": text, "is_positional": True}, **options)


def flag(
    text: str, metavar: str | None = None, *, name: str = "", default: Any = None, **options: Any
) -> Any:
    """Return a field for a flag, which is called `name` or like the field.

    `options` are those of `add_argument`.
    """
    metadata = {"metavar": metavar, "help": text, "name": name, "options": options}
    return field(metadata=metadata, default=default)


@dataclass(frozen=True, kw_only=True)
class Command(ABC):
    """Arguments of a command. The docstring is its description."""

    needs_jax: ClassVar[bool] = True
    can_resume: ClassVar[bool] = False  # when it was stopped, by the same command

    @abstractmethod
    def run(self) -> int:
        """Run the command and return the exit code."""

    @classmethod
    def add_to(cls, parser: argparse.ArgumentParser) -> None:
        """Add the description and the arguments."""
        parser.description = cls.__doc__
        hints = get_type_hints(cls, include_extras=True)
        for item in fields(cls):
            default = item.default
            if item.default_factory is not MISSING:
                default = item.default_factory()
            options = _reader(hints[item.name]) | {"help": item.metadata["help"]}
            options |= item.metadata.get("options", {})
            if item.metadata["metavar"]:
                options["metavar"] = item.metadata["metavar"]
            if default is not MISSING:
                options["default"] = default
            if "is_positional" in item.metadata:
                is_list, is_optional = "nargs" in options, default is not MISSING
                if is_list or is_optional:
                    options["nargs"] = ("*" if is_optional else "+") if is_list else "?"
                # parse_intermixed_args hides the default of a positional while it reads --help.
                options["help"] = options["help"].replace("%(default)s", str(default))
                parser.add_argument(item.name, **options)
            else:
                name = item.metadata["name"] or f"--{item.name.replace('_', '-')}"
                parser.add_argument(name, dest=item.name, **options)


@dataclass(frozen=True, kw_only=True)
class RunCommand(Command):
    """Command that reads a run."""

    run_dir: Path = argument("RUN", "a run directory")

    def require_run(self) -> None:
        """Raise ConfigError unless the directory has the settings and the store of a run."""
        from lightning_jax.train.directory import SETTINGS, STORE, require_run

        require_run(self.run_dir, SETTINGS, STORE)


@dataclass(frozen=True, kw_only=True)
class SettingsCommand(Command):
    """Command that reads files and settings."""

    config: str | None = flag("the same as FILE before all others", "FILE")
    settings: list[str] = argument(
        "FILE|key=value",
        "YAML files and settings; later values override earlier ones (default: config.yaml)",
        default_factory=list,
    )

    def layers(self, folder: Path = Path()) -> list[str]:
        """Return the files and settings of the command line, lowest first.

        If the command line names no file, the config.yaml in `folder`, if there is one, comes
        first. Raises UserError if nothing is left.
        """
        layers = [*([] if self.config is None else [self.config]), *self.settings]
        has_file = any("=" not in layer or Path(layer).is_file() for layer in layers)
        default = folder / "config.yaml"
        if not has_file and default.is_file():
            layers = [str(default), *layers]
        if not layers:
            raise UserError.missing(
                "FILE", f"there is no {default}; pass FILE, or change to the directory that has it."
            )
        return layers

    def load_config(self, folder: Path = Path(), *, only: Sequence[str] | None = None) -> "Config":
        """Return the settings of `layers`, or some sections of them. Raises ConfigError."""
        from lightning_jax.settings import load_config
        from lightning_jax.train.config import Config

        return load_config(Config, self.layers(folder), only=only)


def _reader(hint: Any) -> dict[str, Any]:
    """Return the options of `add_argument` that read values of a type."""
    members = get_args(hint)
    if NoneType in members:
        (hint,) = (member for member in members if member is not NoneType)
    if hint is bool:
        return {"action": "store_true"}
    if get_origin(hint) is list:
        return _reader(get_args(hint)[0]) | {"nargs": "*"}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    return {"type": _number_of(hint) if get_origin(hint) is Annotated else hint}


def _number_of(hint: Any) -> Callable[[str], int | float]:
    """Return a parser of numbers that a type such as `AtLeastOne` allows."""

    def number(text: str) -> int | float:
        from pydantic import TypeAdapter, ValidationError  # not needed for --help

        from lightning_jax.settings.schema import describe

        try:
            return TypeAdapter(hint).validate_python(text)
        except ValidationError:
            message = f"{text!r} cannot be used; expected a number that is {describe(hint)}"
            raise argparse.ArgumentTypeError(message) from None

    return number
