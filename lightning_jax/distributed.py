"""Several processes that run one program: how they meet, and how the others follow process 0.

A program that spans the devices of several processes runs when all of them have started it, and all
must start such programs in the same order. Process 0 runs the loop. Before each such program it
says which method comes next, with the arguments, and the others call the same on their own object.
"""

import asyncio
import logging
import pickle
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import jax
import numpy as np
from jax.errors import JaxRuntimeError
from jax.experimental import multihost_utils

from lightning_jax.config import ConfigError, DistributedConfig
from lightning_jax.types import UserError

log = logging.getLogger(__name__)

_POLL_S = 30
_HEED_S = 1.0
_STOP = "lightning_jax/stop"
_SMALLEST = 1 << 16  # bytes sent at once; sizes are rounded up to powers of two, a compile each


def join(config: DistributedConfig) -> None:
    """Meets the other processes, as `config` says; before anything touches a device.

    Raises ConfigError where they do not appear in time. When one process ends, so do the others.
    """
    if config.mode == "none" or jax.distributed.is_initialized():
        return
    manual = config.mode == "manual"
    # JAX's own handler of SIGTERM would take the place of ours, and only note the signal.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            config.coordinator,
            config.num_processes,
            config.process_id,
            # Slurm's own answer would leave each process but one device.
            cluster_detection_method="deactivate" if manual else None,
            initialization_timeout=config.timeout_s,
        )
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"the processes of distributed.mode={config.mode} did not meet: {error}. Check that "
            "all run, that they reach distributed.coordinator, and that this is the first use of "
            "JAX in the process.",
            reason="not_joined",
            key="distributed.mode",
        ) from error
    log.info(
        "process %d of %d, with %d of %d devices",
        jax.process_index(),
        jax.process_count(),
        jax.local_device_count(),
        jax.device_count(),
    )


def is_leader() -> bool:
    """Whether this is process 0, or the only one."""
    return jax.process_index() == 0


class Stopped(UserError):
    """A process other than 0 was told to stop, and so all do."""


def ask_to_stop() -> None:
    """Has process 0 end the run, from another one that was told to stop."""
    _journal().key_value_set(_STOP, str(jax.process_index()), allow_overwrite=True)


@asynccontextmanager
async def heeding_others() -> AsyncIterator[None]:
    """In process 0: cancels what runs inside once another process asks to stop; raises Stopped."""
    if jax.process_count() == 1:
        yield
        return
    asked_by: list[str] = []
    main = asyncio.current_task()
    assert main is not None, "a coroutine runs in a task"

    async def heed() -> None:
        while not (asked := _asked_to_stop()):
            await asyncio.sleep(_HEED_S)
        asked_by.append(asked)
        main.cancel()

    heeding = asyncio.create_task(heed())
    try:
        yield
    except asyncio.CancelledError:
        if not asked_by:
            raise
        raise Stopped(
            f"process {asked_by[0]} of {jax.process_count()} was told to stop, so all have; the "
            "same command in each goes on from the last checkpoint"
        ) from None
    finally:
        heeding.cancel()


def _asked_to_stop() -> str | None:
    """The process that asks for it, if one does."""
    try:
        return _journal().key_value_try_get(_STOP)
    except JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
        return None


class Leader:
    """Process 0's way to call a method of `target` in every process at once."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._sent = 0

    def call(self, method: str, *arguments: Any) -> Any:
        """What `target.method(*arguments)` returned here. The arguments must pickle."""
        self.tell(method, *arguments)
        return getattr(self._target, method)(*arguments)

    def tell(self, method: str, *arguments: Any) -> None:
        """As `call`, but here the caller does at once what the method does elsewhere."""
        self._send((method, arguments))

    def dismiss(self) -> None:
        """Lets the others end."""
        self._send(None)

    def _send(self, command: tuple[str, tuple[Any, ...]] | None) -> None:
        if jax.process_count() == 1:
            return
        payload = pickle.dumps(command)
        _journal().key_value_set(_key(self._sent), str(len(payload)))
        self._sent += 1
        _broadcast(payload, len(payload))


def follow(target: Any) -> None:
    """Calls on `target` what process 0 calls on its own, until it says that it is over."""
    received = 0
    while True:
        size = _wait_for(_key(received))
        received += 1
        command = pickle.loads(_broadcast(b"", size))
        if command is None:
            return
        method, arguments = command
        getattr(target, method)(*arguments)


def _key(number: int) -> str:
    return f"lightning_jax/command/{number}"


def _wait_for(key: str) -> int:
    """The size of the next command.

    It may take as long as the rollouts of a step, so the wait is on the coordinator's journal: one
    inside a device program would be taken for a hang.
    """
    while True:
        try:
            return int(_journal().blocking_key_value_get(key, _POLL_S * 1000))
        except JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


def _broadcast(payload: bytes, size: int) -> bytes:
    """Process 0's `payload` of `size` bytes, in every process."""
    room = max(_SMALLEST, 1 << (size - 1).bit_length())
    buffer = np.zeros(room, np.uint8)
    buffer[: len(payload)] = np.frombuffer(payload, np.uint8)
    return multihost_utils.broadcast_one_to_all(buffer)[:size].tobytes()


def _journal() -> Any:
    """The key-value store of the coordinator. JAX has no public name for it."""
    from jax._src.distributed import global_state

    assert global_state.client is not None, "the processes have met"
    return global_state.client
