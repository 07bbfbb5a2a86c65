"""Names of tasks, and their fields as a rollout's record keeps them: texts, long ones cut."""

import json
from collections.abc import Container, Mapping
from typing import Any

MAX_FIELDS = 50
MAX_FIELD_CHARS = 2000
MAX_NAME_CHARS = 100


def is_unnamed(task: Mapping[str, Any]) -> bool:
    """Return True if a task has no id. Tables write a missing one as null, NaN or ""."""
    name = task.get("id")
    return name is None or name == "" or name != name


def free_name(name: str, names: Container[str]) -> str:
    """Return the name, with + behind it as often as it takes to differ from these."""
    while name in names:
        name += "+"
    return name


def shorten_task(task: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields of a task other than its id. Anything but a text is written as JSON.

    A text longer than MAX_FIELD_CHARS, and fields beyond MAX_FIELDS, are cut; the number of
    characters or fields left out is in their place.
    """
    fields = {}
    for name, value in task.items():
        if name == "id":
            continue
        if len(fields) == MAX_FIELDS:
            fields["..."] = f"{len(task) - 1 - MAX_FIELDS} more fields"
            break
        fields[str(name)[:MAX_NAME_CHARS]] = _short(_text(value))
    return fields


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, default=repr)
    except Exception:  # noqa: BLE001  (a cycle, keys that are no texts, a custom __repr__)
        return f"<{type(value).__name__}>"


def _short(text: str) -> str:
    left_out = len(text) - MAX_FIELD_CHARS
    return text if left_out <= 0 else f"{text[:MAX_FIELD_CHARS]} [... {left_out:,} more characters]"
