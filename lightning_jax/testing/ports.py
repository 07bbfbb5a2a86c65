"""Free ports for servers that need a port number."""

import socket


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
