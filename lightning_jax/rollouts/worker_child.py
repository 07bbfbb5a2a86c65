"""Script of a worker on the run's own machine. `local_workers.py` starts it.

Standard input is a socket to the trainer. It gets one line of JSON with the settings, and answers
with one line if the agent cannot be loaded. The worker ends when the socket closes.
"""

import asyncio
import json
import logging
import os
import socket
import sys
from typing import Any


def main(channel: socket.socket, settings: dict[str, Any]) -> None:
    """Work until the trainer closes the socket."""
    from lightning_jax.rollouts.worker import run_from_settings
    from lightning_jax.system.text import plain_handler

    logging.basicConfig(level=logging.WARNING, handlers=[plain_handler()])
    error = asyncio.run(_until_closed(channel, run_from_settings(settings)))
    if error is not None:  # no worker can run the agent
        channel.setblocking(True)
        channel.sendall(json.dumps(error).encode() + b"\n")


async def _until_closed(channel: socket.socket, working: Any) -> Any:
    """Return the result of `working`, or None if the trainer closed the socket first."""
    channel.setblocking(False)
    closed = asyncio.create_task(asyncio.get_running_loop().sock_recv(channel, 1))
    running = asyncio.create_task(working)
    await asyncio.wait({closed, running}, return_when=asyncio.FIRST_COMPLETED)
    running.cancel()
    await asyncio.wait({running})
    return None if running.cancelled() else running.result()


def _read_line(channel: socket.socket) -> bytes:
    received = b""
    while not received.endswith(b"\n") and (chunk := channel.recv(2**16)):
        received += chunk
    return received


if __name__ == "__main__":
    CHANNEL = socket.socket(fileno=os.dup(0))
    NULL = os.open(os.devnull, os.O_RDONLY)
    os.dup2(NULL, 0)  # the agent must not read from the socket
    os.close(NULL)
    if LINE := _read_line(CHANNEL):
        SETTINGS = json.loads(LINE)
        sys.path[:] = SETTINGS["sys_path"]  # imports find what they find in the trainer
        main(CHANNEL, SETTINGS)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without waiting for threads of agents
