"""Coordination of several processes that run one program.

A program that spans the devices of several processes needs all of them to start it, in the same
order. Process 0 runs the loop. Before each such program it sends a method and its arguments, and
the other processes call that method on their own object.
"""

import asyncio
import itertools
import logging
import pickle
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar, TypeVarTuple

import jax
import numpy as np
from jax.errors import JaxRuntimeError
from jax.experimental import multihost_utils
from pydantic import TypeAdapter

from lightning_jax.errors import UserError
from lightning_jax.models.config import RematKind
from lightning_jax.settings import ConfigError
from lightning_jax.train.config import DistributedConfig

log = logging.getLogger(__name__)

Target = TypeVar("Target")
Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")

_POLL_S = 30
_HEED_S = 1.0
_STOP = "lightning_jax/stop"
_REMAT = "lightning_jax/remat"
_SMALLEST = 1 << 16  # minimum bytes per broadcast; sizes are powers of two, one compile each


def join(config: DistributedConfig) -> None:
    """Connect to the other processes. Call this before anything touches a device.

    When one process ends, so do the others. Raises ConfigError if they do not connect in time.
    """
    if config.mode == "none" or jax.distributed.is_initialized():
        return
    manual = config.mode == "manual"
    # JAX's SIGTERM handler would replace ours, and only record the signal.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            config.coordinator,
            config.num_processes,
            config.process_id,
            # Slurm's detection would give each process only one device.
            cluster_detection_method="deactivate" if manual else None,
            initialization_timeout=config.timeout_s,
        )
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"the processes of distributed.mode={config.mode} did not connect: {error}. Check that "
            "all run, that distributed.coordinator is reachable, and that JAX was not used "
            "earlier in the process.",
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
    """Return True in process 0, including when it is the only process."""
    return jax.process_index() == 0


def is_follower() -> bool:
    """Return True in a process of a run of several that is not process 0."""
    return jax.distributed.is_initialized() and not is_leader()


class Stopped(UserError):
    """Stop of the run because another process was asked to stop."""


def ask_to_stop() -> None:
    """Ask process 0 to end the run, from another process that was asked to stop."""
    _journal().key_value_set(_STOP, str(jax.process_index()), allow_overwrite=True)


@asynccontextmanager
async def cancel_on_stop() -> AsyncIterator[None]:
    """Cancel the body, in process 0, once another process asks to stop.

    Raises Stopped.
    """
    if jax.process_count() == 1:
        yield
        return
    asked_by: list[str] = []
    main = asyncio.current_task()
    assert main is not None, "a coroutine runs in a task"

    async def heed() -> None:
        while not (process := _asked_to_stop()):
            await asyncio.sleep(_HEED_S)
        asked_by.append(process)
        main.cancel()

    heeding = asyncio.create_task(heed())
    try:
        yield
    except asyncio.CancelledError:
        if not asked_by:
            raise
        raise Stopped(
            f"process {asked_by[0]} of {jax.process_count()} received a stop signal, so all "
            "processes stop; run the same command in each to resume from the last checkpoint"
        ) from None
    finally:
        heeding.cancel()


def _asked_to_stop() -> str | None:
    """Return the process that asked to stop, or None."""
    try:
        return _journal().key_value_try_get(_STOP)
    except JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
        return None


def agree_on_remat(chosen: RematKind | None = None) -> RematKind:
    """Return the kind that process 0 has `chosen`, because all processes run the same programs.

    The others call this without one, and wait.
    """
    if chosen is None:
        return TypeAdapter(RematKind).validate_python(_wait_for(_REMAT))
    if jax.process_count() > 1:
        _journal().key_value_set(_REMAT, chosen)
    return chosen


class Leader(Generic[Target]):
    """Caller of the methods of `target` in all processes at once, used by process 0.

    A method is named by its function, such as `Replica.update`. Arguments must be picklable.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self._sent = 0

    def call(
        self, method: Callable[[Target, *Arguments], Result], *arguments: *Arguments
    ) -> Result:
        """Call the method everywhere and return the result of this process."""
        self.tell(method, *arguments)
        return method(self.target, *arguments)

    def tell(self, method: Callable[[Target, *Arguments], object], *arguments: *Arguments) -> None:
        """Call the method in the other processes only.

        The caller must do the same work here at once.
        """
        self._send((method, arguments))

    def stop_followers(self) -> None:
        """Let the other processes end."""
        self._send(None)

    def _send(self, command: Any) -> None:
        if jax.process_count() == 1:
            return
        payload = pickle.dumps(command)
        _journal().key_value_set(_key(self._sent), str(len(payload)))
        self._sent += 1
        _broadcast(payload, len(payload))


def follow(target: Any) -> None:
    """Call on `target` each method that process 0 sends, until process 0 lets this process end."""
    for received in itertools.count():
        size = int(_wait_for(_key(received)))
        command = pickle.loads(_broadcast(b"", size))
        if command is None:
            return
        method, arguments = command
        method(target, *arguments)


def _key(number: int) -> str:
    return f"lightning_jax/command/{number}"


def _wait_for(key: str) -> str:
    """Return what process 0 sets for a key.

    The next command may take as long as the rollouts of a step to arrive. The wait uses the
    coordinator's key-value store, because a wait inside a device program would look like a hang.
    """
    while True:
        try:
            return _journal().blocking_key_value_get(key, _POLL_S * 1000)
        except JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


def _broadcast(payload: bytes, size: int) -> bytes:
    """Return process 0's `payload` of `size` bytes in every process."""
    room = max(_SMALLEST, 1 << (size - 1).bit_length())
    buffer = np.zeros(room, np.uint8)
    buffer[: len(payload)] = np.frombuffer(payload, np.uint8)
    return multihost_utils.broadcast_one_to_all(buffer)[:size].tobytes()


def _journal() -> Any:
    """Return the coordinator's key-value store. JAX has no public name for it."""
    from jax._src.distributed import global_state

    assert global_state.client is not None, "the processes have met"
    return global_state.client
