"""Ports of this machine."""

import socket


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port of this address that is free now."""
    with socket.socket() as found:
        found.bind((host, 0))
        return found.getsockname()[1]
