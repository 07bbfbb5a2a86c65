"""Runs one agent function in another interpreter; `program.py` starts it as a script.

    python agent_child.py FILE:FUNCTION        loads it, and fails where that cannot be done
    python agent_child.py FILE:FUNCTION FD     runs it and writes the result to a file descriptor

The task comes as JSON on standard input, the model's URL, key and name in the environment. It needs
nothing but the standard library, from Python 3.8 on.
"""

import os
import sys

if __name__ == "__main__":
    # The folder of this script holds modules named like the standard library's (types.py).
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]

import asyncio
import importlib.util
import inspect
import json
import socket
import traceback
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

MAX_MEMBERS = 1000  # errors of a group that are looked at
MAX_CHAIN = 20  # errors that led to one

_HTTPX = frozenset({"NetworkError", "TimeoutException", "RemoteProtocolError", "ProxyError"})
# Errors of clients that got no whole answer, by package. A class counts with those below it, and is
# known by its name: nothing of this is imported.
CONNECTION_ERRORS = {
    "openai": {"APIConnectionError"},
    "anthropic": {"APIConnectionError"},
    "httpx": _HTTPX,
    "httpx2": _HTTPX,
    "httpcore": _HTTPX,
    "httpcore2": _HTTPX,
    "aiohttp": {"ClientConnectionError", "ClientPayloadError"},
    "requests": {"ConnectionError", "Timeout", "ChunkedEncodingError"},
    "urllib3": {"TimeoutError", "ProtocolError", "NewConnectionError", "MaxRetryError"},
    "urllib": {"URLError"},
    "http": {"IncompleteRead"},
    "google": {"ServiceUnavailable", "GatewayTimeout", "RetryError", "TransportError"},
    "botocore": {"ConnectionError", "HTTPClientError"},
    "redis": {"ConnectionError", "TimeoutError"},
    "websockets": {"ConnectionClosed"},
}
# Below some of them: an answer with an error status, and a limit of the client itself.
NO_CONNECTION_ERRORS = {
    "urllib": {"HTTPError"},
    "httpx": {"PoolTimeout"},
    "httpx2": {"PoolTimeout"},
}


class LLM:
    """What an agent gets in place of `lightning_jax.types.LLM`."""

    def __init__(self) -> None:
        self.base_url = os.environ["OPENAI_BASE_URL"]
        self.api_key = os.environ["OPENAI_API_KEY"]
        self.model = os.environ["OPENAI_MODEL"]


def load(reference: str) -> Any:
    """The function that FILE:FUNCTION names; ends this process where there is none."""
    path, _, name = reference.rpartition(":")
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))  # as `python FILE` does
    module_name = module_name_of(path, "_agent")
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        sys.exit(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (ImportError, OSError, SyntaxError) as error:
        sys.exit(f"{path} cannot be loaded: {error}")
    function = getattr(module, name, None)
    if not callable(function):
        sys.exit(f"{path} has no function {name!r}")
    return function


def module_name_of(path: str, otherwise: str) -> str:
    """The file's own name where importing that would load the file, and has loaded nothing yet: so
    processes that it starts can import it too.
    """
    name = os.path.splitext(os.path.basename(path))[0]
    if name in sys.modules or not name.isidentifier():
        return otherwise
    spec = importlib.util.find_spec(name)
    found = spec and spec.origin and os.path.realpath(spec.origin)
    return name if found == os.path.realpath(path) else otherwise


def run(function: Any, channel: int) -> None:
    """Writes what the agent returned or raised, and ends this process: threads and tasks that it
    left behind are not waited for.
    """
    join_trace()
    try:
        told = {"result": answer(function, json.load(sys.stdin))}
    except Exception as error:  # noqa: BLE001  (foreign code: `program.py` raises it again)
        traceback.print_exc()
        errors = members(error)
        faults = faults_of(errors)
        first = (faults or errors)[0]
        told = {
            "error": type(first).__name__,
            "message": words_of(first)[:2000],
            "is_connection": not faults,
            "addresses": [address_of(each) for each in errors[:100]],
        }
    with os.fdopen(channel, "w") as file:
        file.write(as_json(told))
    flush_spans()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def members(error: BaseException) -> list:
    """Return the errors in a group, as a task group raises it; else the error.

    Groups may lie in groups. Members that were only cancelled are left out beside others.
    """
    found, left, seen = [], [error], set()
    while left and len(found) < MAX_MEMBERS:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        inside = value_of(each, "exceptions")  # of Python's own groups, and of older libraries'
        held = inside if isinstance(inside, (list, tuple)) else ()
        errors = [one for one in reversed(held) if isinstance(one, BaseException)]
        left += errors
        if not errors:
            found.append(each)
    ended = [one for one in found if not issubclass(type(one), asyncio.CancelledError)]
    return ended or found or [error]


def faults_of(errors: list) -> list:
    """Return the errors that are not a connection's, nor were raised because of one's."""
    return [each for each in errors if not any(map(is_connection_error, chain(each)))]


def chain(error: BaseException) -> list:
    """Return the error and what it was raised from, or while handling what."""
    found = []
    following = error
    while following is not None and len(found) < MAX_CHAIN:
        found.append(following)
        hidden = following.__suppress_context__
        following = following.__cause__ or (None if hidden else following.__context__)
    return found


def is_connection_error(error: BaseException) -> bool:
    """Return whether a client says by the type of the error that it got no whole answer.

    A time-out that the agent set itself, `TimeoutError`, is none; a client's own is one.
    """
    kind = type(error)
    if issubclass(kind, (ConnectionError, socket.gaierror)):
        return True
    for each in kind.__mro__:
        package = str(each.__module__).partition(".")[0]
        if each.__name__ in NO_CONNECTION_ERRORS.get(package, ()):
            return False
        if each.__name__ in CONNECTION_ERRORS.get(package, ()):
            # urllib says so of a scheme that it does not know, too.
            return package != "urllib" or isinstance(getattr(error, "reason", None), OSError)
    return False


def address_of(error: BaseException) -> Any:
    """Return HOST:PORT of the server that the failed request was for, or None if unknown."""
    for each in chain(error):
        request = value_of(each, "request")
        place = urlsplit(str(value_of(request, "url") or "")).netloc
        owner = each if value_of(each, "port") else value_of(each, "pool")
        if not place and value_of(owner, "host") and value_of(owner, "port"):
            place = "{}:{}".format(value_of(owner, "host"), value_of(owner, "port"))
        if place:
            return place
        if isinstance(value_of(each, "lightning_address"), str):
            return each.lightning_address  # type: ignore[attr-defined]
    return None


def value_of(holder: Any, name: str) -> Any:
    """Return an attribute of a foreign object, or None if it has none or fails to say."""
    try:
        return getattr(holder, name, None)
    except Exception:  # noqa: BLE001
        return None


def words_of(error: BaseException) -> str:
    """What it says; foreign code, which may fail at that as well."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001
        return ""


def answer(function: Any, task: Any) -> Any:
    """What the agent makes of the task. A plain function finds no event loop that runs, so that it
    may start one.
    """
    result = function(task, LLM())
    if inspect.isawaitable(result):
        return asyncio.new_event_loop().run_until_complete(result)
    return result


def join_trace() -> None:
    """Spans that the agent makes with OpenTelemetry, where it uses it, go below the rollout's."""
    if "opentelemetry" in sys.modules and "TRACEPARENT" in os.environ:
        from opentelemetry import context, propagate

        context.attach(propagate.extract({"traceparent": os.environ["TRACEPARENT"]}))


def flush_spans() -> None:
    """Has OpenTelemetry, where the agent uses it, send the spans that it still holds."""
    trace = sys.modules.get("opentelemetry.trace")
    flush = getattr(trace.get_tracer_provider(), "force_flush", None) if trace else None
    if flush:
        flush(5000)


def as_json(told: Any) -> str:
    """What JSON does not know becomes a text, which is no reward, but NumPy's numbers."""
    try:
        return json.dumps(told, default=known_to_json)
    except (TypeError, ValueError, RecursionError):  # keys of other types, a loop, ...
        return json.dumps({"result": repr(told.get("result"))[:2000]})


def known_to_json(value: Any) -> Any:
    """A mapping, the number in an array without axes, or a text."""
    if isinstance(value, Mapping):
        return dict(value)
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    return repr(value)


if __name__ == "__main__":
    FUNCTION = load(sys.argv[1])
    if len(sys.argv) > 2:
        run(FUNCTION, int(sys.argv[2]))
