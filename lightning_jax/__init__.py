"""Train any LLM agent with reinforcement learning, in JAX.

`import lightning_jax as lj` imports nothing else. Each name of the file `__init__.pyi` loads its
module when it is first used. docs/python_api.md lists them.
"""

import ast
import difflib
import importlib
from pathlib import Path
from typing import Any

# Public name: the module that defines it, and its name in that module.
_NAMES = {
    alias.asname: (node.module, alias.name)
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text("utf-8")).body
    if isinstance(node, ast.ImportFrom) and node.module
    for alias in node.names
    if alias.asname
}
_NAMES["train"] = (__name__, "train")  # the room, which is called like the function
__all__ = list(_NAMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        close = difflib.get_close_matches(name, _NAMES, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    module, attribute = _NAMES[name]
    defined = vars(importlib.import_module(module))
    value = defined.get(attribute) or importlib.import_module(f"{module}.{attribute}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES})
