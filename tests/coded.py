"""Look at errors by their fields: `reason` and `key`, not the message."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lightning_jax.types import Coded


@contextmanager
def raises_coded(
    kind: type[Coded], reason: str, key: str | None = None
) -> Iterator[pytest.ExceptionInfo[Coded]]:
    """Expect an error of this kind and reason and, where one is given, of this key."""
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    assert (error.reason, error.key) == (reason, error.key if key is None else key), str(error)
