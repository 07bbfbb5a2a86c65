"""Test of free ports."""

import socket

from lightning_jax.system.ports import free_port


def test_port_can_be_bound() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))
