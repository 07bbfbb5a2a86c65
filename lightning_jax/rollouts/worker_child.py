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
import traceback
from typing import Any


def main(channel: socket.socket, settings: dict[str, Any]) -> None:
    """Work until the trainer closes the socket."""
    from lightning_jax.errors import UserError
    from lightning_jax.rollouts.config import AgentConfig
    from lightning_jax.rollouts.fingerprint import fingerprint
    from lightning_jax.rollouts.program import make_agent
    from lightning_jax.rollouts.worker import Refused, Server, work

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    config = AgentConfig(**{**settings["agent"], "env": tuple(settings["agent"]["env"])})
    try:
        agent = make_agent(config)
    except UserError as error:
        fail(channel, str(error), error.reason, error.key)
    except Exception as error:  # noqa: BLE001  (foreign code at import)
        traceback.print_exc()
        words = f"the agent cannot be loaded: {type(error).__name__}: {error}"
        fail(channel, words[:2000], "not_loaded", "agent.function")
    else:
        name, concurrency = settings["name"], settings["concurrency"]
        server = Server(settings["url"], settings["key"])
        working = work(agent, fingerprint(config), server, concurrency=concurrency, name=name)
        try:
            asyncio.run(_until_closed(channel, working))
        except Refused as error:  # the agent's file was edited after the run began
            fail(channel, str(error), error.reason, error.key)


async def _until_closed(channel: socket.socket, working: Any) -> None:
    channel.setblocking(False)
    closed = asyncio.create_task(asyncio.get_running_loop().sock_recv(channel, 1))
    running = asyncio.create_task(working)
    await asyncio.wait({closed, running}, return_when=asyncio.FIRST_COMPLETED)
    running.cancel()
    await asyncio.wait({running})
    if not running.cancelled():
        running.result()


def fail(channel: socket.socket, message: str, reason: str, key: "str | None") -> None:
    """Tell the trainer that no worker can run the agent."""
    channel.setblocking(True)
    error = {"message": message, "reason": reason, "key": key}
    channel.sendall(json.dumps(error).encode() + b"\n")


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
