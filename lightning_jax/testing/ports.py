"""Ports for servers that have to be told one."""

import socket


def free_port() -> int:
    """One of 127.0.0.1 on which nothing listens, now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
