"""Helper program of an experiment that exits with the experiment, even if that is killed."""

import json
import logging
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

from lightning_jax.errors import UserError
from lightning_jax.system.child_process import ChildProcess

log = logging.getLogger(__name__)

END_TIMEOUT_S = 5.0


class SideProcessError(UserError, RuntimeError):
    """Failure of the program to start. The message is one sentence."""


@contextmanager
def side_process(arguments: Sequence[str], *, start_timeout_s: float) -> Iterator[dict[str, Any]]:
    """Run a Python program and yield the JSON object that it prints on one line when ready.

    The program must exit when its standard input closes (see ChildProcess). Raises SideProcessError
    with the program's last words if it is not ready in time.
    """
    with tempfile.TemporaryFile("w+") as errors:
        child = ChildProcess(
            arguments, stdout=subprocess.PIPE, stderr=errors, text=True, end_s=END_TIMEOUT_S
        )
        process = child.popen
        assert process.stdout, "it is a pipe"
        try:
            started = _ready(process, errors, arguments[0], start_timeout_s)
            try:
                yield started
            finally:
                if process.poll() is not None:
                    log.warning(
                        "%s exited unexpectedly: %s",
                        arguments[0],
                        _last_words(errors),
                        extra={"event": "side_process_ended", "last_words": _last_words(errors)},
                    )
        finally:
            child.end()
            process.stdout.close()


def _ready(
    process: subprocess.Popen[str], errors: IO[str], name: str, timeout_s: float
) -> dict[str, Any]:
    lines: list[str] = []
    assert process.stdout, "it is a pipe"
    read = process.stdout.readline
    reader = threading.Thread(target=lambda: lines.append(read()), daemon=True)
    reader.start()
    reader.join(timeout_s)
    if not lines:
        raise SideProcessError(
            f"{name} did not print its ready line within {timeout_s:g} s.",
            reason="timeout",
            key=name,
        )
    try:
        return json.loads(lines[0])
    except ValueError:
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_TIMEOUT_S)
        last_words = lines[0].strip() or _last_words(errors)
        raise SideProcessError(
            f"{name} did not start: {last_words.removeprefix('error: ')}",
            reason="not_started",
            key=name,
        ) from None


def _last_words(errors: IO[str]) -> str:
    errors.seek(0)
    lines = [line.strip() for line in errors.read()[-4000:].splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
