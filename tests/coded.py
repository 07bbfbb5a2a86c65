"""Look at errors by their fields: `reason` and `key`, not the message."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def raises_coded(
    kind: type[Exception], reason: str, key: str | None = None
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Expect an error of this kind and reason and, where one is given, of this key."""
    with pytest.raises(kind) as caught:
        yield caught
    error: Any = caught.value
    assert error.reason == reason, str(error)
    assert key is None or error.key == key, str(error)
