"""Ports of this machine, and variables that send a process's HTTP calls to a proxy.

A call to the run's own address must not go to a proxy: it would answer for a host that it does not
know, and the agent would see nothing but a failed connection.
"""

import logging
import os
import socket
from collections.abc import Mapping, MutableMapping
from urllib.parse import urlsplit

log = logging.getLogger(__name__)

PROXIES = ("ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY", "all_proxy", "http_proxy", "https_proxy")
EXEMPT = ("no_proxy", "NO_PROXY")  # clients read one or the other
LOOPBACK = ("127.0.0.1", "localhost")


def with_direct_host(environment: Mapping[str, str], url: str) -> dict[str, str]:
    """Return the variables of a process, with the host of `url` exempt from proxies.

    Without a proxy in the environment they are left alone: on macOS these variables would turn off
    the system's own proxies, and some clients take them for a proxy.
    """
    changed, host = dict(environment), urlsplit(url).hostname
    if not host or not proxies_in(environment):
        return changed
    hosts = LOOPBACK if host in LOOPBACK else (host,)
    values = {name: environment[name] for name in EXEMPT if name in environment}
    for name in EXEMPT:
        before = values.get(name, next(iter(values.values()), ""))
        entries = [entry.strip() for entry in before.split(",") if entry.strip()]
        if "*" not in entries:  # then nothing goes to a proxy
            entries += [host for host in hosts if host not in entries]
        changed[name] = ",".join(entries)
    return changed


def go_direct(url: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Let the calls of this process to the host of `url` go around any proxy, and log it once."""
    if not proxies_in(environment):
        return  # without a copy of all variables, which each rollout would wait for
    changed = with_direct_host(environment, url)
    new = {name: changed[name] for name in EXEMPT if environment.get(name) != changed.get(name)}
    if not new:
        return
    environment.update(new)
    host, names = urlsplit(url).hostname, proxies_in(environment)
    log.info(
        "calls to %s bypass the proxy in %s: the host was added to NO_PROXY",
        *(host, ", ".join(names)),
        extra={"event": "direct_host", "host": host, "proxies": names},
    )


def proxies_in(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that set a proxy."""
    return [name for name in PROXIES if environment.get(name)]


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port of this address that is free now."""
    with socket.socket() as server:
        server.bind((host, 0))
        return server.getsockname()[1]
