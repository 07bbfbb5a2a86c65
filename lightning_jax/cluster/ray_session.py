"""Connection to Ray, which is an optional dependency and is imported here only."""

import importlib
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning_jax.errors import UserError
from lightning_jax.settings import ConfigError
from lightning_jax.settings.loading import is_installed
from lightning_jax.system.text import in_one_line
from lightning_jax.train.config import AUTO_CLUSTER, LOCAL_CLUSTER, ClusterConfig

NAMESPACE = "lightning_jax"
CONNECT_S = 10.0  # for the head of a cluster to accept a connection
# Ray reads the first one to learn whether a cluster asks for a token, and the others to find it.
TOKEN_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
# For a cluster of this process. Without a token any user of the machine could run code in it. Since
# 2.59 Ray makes one, but keeps it in a file of the home directory, which agents' programs can read.
# Ray remembers a process's first token, so there is one for all clusters of this process.
_SESSION_TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}  # options of an actor


class ClusterError(UserError, RuntimeError):
    """Cluster that does not give a run what it needs."""


def require_ray(config: ClusterConfig) -> None:
    """Raise ConfigError if the settings need Ray and it is not installed."""
    if config.address is not None and not is_installed("ray"):
        raise ConfigError.not_installed(
            "cluster.address",
            f"cluster.address is {config.address}, but Ray is not installed; install it with "
            "pip install 'lightning-jax[ray]', or leave cluster.address out.",
        )


@contextmanager
def ray_session(config: ClusterConfig) -> Iterator[Any]:
    """Join the cluster that the settings name, and yield the module `ray`. Leave it at the end.

    Raises ConfigError if Ray is not installed or the cluster cannot be joined.
    """
    require_ray(config)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would send statistics to its makers
    if config.address == LOCAL_CLUSTER:  # keeps all addresses on the loopback interface
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        if not any(name in os.environ for name in TOKEN_VARIABLES):
            os.environ |= _SESSION_TOKEN
    ray: Any = importlib.import_module("ray")
    settings: dict[str, Any] = {"address": config.address, "namespace": NAMESPACE}
    if config.address == LOCAL_CLUSTER:
        settings["include_dashboard"] = False
    elif config.address != AUTO_CLUSTER:
        _check_reachable(str(config.address))
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(**settings, log_to_driver=False, logging_level="WARNING")
    except Exception as error:  # Ray's own errors have no base that all releases have
        if "Authentication" in type(error).__name__:
            raise _no_token(str(config.address), error) from error
        raise _unreachable(str(config.address), error) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray's would end the run without a checkpoint
    try:
        yield ray
    finally:
        ray.shutdown()


def actor_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Return Ray's options for an actor that takes these resources."""
    options: dict[str, Any] = {"num_cpus": 0.0}
    options |= {_OPTIONS[name]: number for name, number in resources.items() if name in _OPTIONS}
    others = {name: number for name, number in resources.items() if name not in _OPTIONS}
    return options | ({"resources": others} if others else {})


def room_in_words(ray: Any, resources: Mapping[str, float]) -> str:
    """Return how much of these resources the cluster has, and how much of it is free."""
    total, free = ray.cluster_resources(), ray.available_resources()
    nodes = sum(node["Alive"] for node in ray.nodes())
    amounts = (f"{name} {total.get(name, 0):g} ({free.get(name, 0):g} free)" for name in resources)
    return f"{nodes} machine{'s' * (nodes != 1)} with {', '.join(amounts)}"


def _check_reachable(address: str) -> None:
    """Raise ConfigError at once if nothing listens there. Ray itself would try for a minute."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        raise _unreachable(address, error) from error


def _no_token(address: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"the Ray cluster at cluster.address={address} asks for a token ({_brief(error)}); set "
        "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to the token that it was started with.",
        reason="no_token",
        key="RAY_AUTH_TOKEN",
    )


def _brief(error: Exception) -> str:
    return in_one_line(str(error)).rstrip(".")


def _unreachable(address: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"the Ray cluster at cluster.address={address} cannot be joined ({_brief(error)}); start "
        "it with `ray start --head` on one machine and `ray start --address=HOST:PORT` on the "
        "others, with the same versions of Ray and Python.",
        reason="not_joined",
        key="cluster.address",
    )
