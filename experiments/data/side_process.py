"""Helper program of an experiment that exits with the experiment, even if that is killed."""

import json
import logging
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

from lightning_jax.errors import UserError

log = logging.getLogger(__name__)

END_TIMEOUT_S = 5.0


class SideProcessError(UserError, RuntimeError):
    """Failure of the program to start. The message is one sentence."""


@contextmanager
def side_process(arguments: Sequence[str], *, start_timeout_s: float) -> Iterator[dict[str, Any]]:
    """Run a Python program and yield the JSON object that it prints on one line when ready.

    The program's standard input is a pipe from this process. The system closes it when this process
    ends, killed or not, and the program must then exit. Raises SideProcessError with the program's
    last words if it is not ready in time.
    """
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,  # Ctrl-C must reach only us; we end the program
        )
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
            _end(process)


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


def _end(process: subprocess.Popen[str]) -> None:
    """Close the program's input, and kill it if that does not end it."""
    assert process.stdin and process.stdout, "they are pipes"
    with suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
