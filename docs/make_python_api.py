"""Write python_api.md, a table of the package's public names."""

import inspect
import sys
import types
from pathlib import Path
from typing import Any

import lightning_jax as lj
import lightning_jax.types
from lightning_jax.train.loop import trainer

ROOT = Path(__file__).parents[1]
TARGET = Path(__file__).with_name("python_api.md")
INTRODUCTION = """\
# Python API

    import lightning_jax as lj

`lj` has the names below. Each one loads its module when it is first used. The
[README](../README.md#your-own-loop) puts them together to a training loop. `help(lj.Engine)` has
the arguments. `python docs/make_python_api.py` writes this page.

| name | what it is | defined in |
|---|---|---|
"""


def page() -> str:
    """Return the text of the page."""
    return INTRODUCTION + "".join(_row(name, getattr(lj, name)) for name in lj.__all__)


def _row(name: str, value: Any) -> str:
    if value is lj.train:  # the room of that name, which calls the function
        value = trainer.train
    words = (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ")
    if isinstance(value, types.GenericAlias):
        value, words = lj.types, f"Another name for `{value}`."
    module = value if inspect.ismodule(value) else sys.modules[value.__module__]
    path = Path(str(module.__file__)).relative_to(ROOT)
    return f"| `{name}` | {words} | [{'/'.join(path.parts[1:])}](../{path}) |\n"


if __name__ == "__main__":
    TARGET.write_text(page())
