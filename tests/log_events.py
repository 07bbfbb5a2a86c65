"""Look at log records by their event name and extras, not the message."""

from typing import Any

import pytest


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the event names of the captured records that have one, in order."""
    return [name for record in caplog.records if (name := getattr(record, "event", None))]


def records(caplog: pytest.LogCaptureFixture, event: str) -> list[Any]:
    """Return the captured records of one event. Its extras are attributes of a record."""
    return [record for record in caplog.records if getattr(record, "event", None) == event]
