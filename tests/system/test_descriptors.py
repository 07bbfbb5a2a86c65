"""Tests of errors from running out of memory, threads or file descriptors."""

import errno

import pytest

from lightning_jax.system.descriptors import lacks_resources


def _caused_by(cause: BaseException) -> BaseException:
    error = ValueError("no answer")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        OSError(errno.EMFILE, "Too many open files"),
        RuntimeError("can't start new thread"),
        _caused_by(MemoryError("Unable to allocate 3 GiB")),
        _caused_by(RuntimeError("can't start new thread")),
    ],
)
def test_machine_lacks_something(error: BaseException) -> None:
    assert lacks_resources(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("no"),
        RuntimeError(),
        OSError(errno.ENOENT, "No such file"),
        ValueError("can't start new thread"),
    ],
)
def test_agent_has_failed(error: BaseException) -> None:
    assert not lacks_resources(error)
