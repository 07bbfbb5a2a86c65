"""Script that runs one agent function in another interpreter. `program.py` starts it.

    python child.py FILE:FUNCTION        load the function, exit with an error if that fails
    python child.py FILE:FUNCTION FD     run it and write the result to a file descriptor

The task arrives as JSON on standard input, and the rollout's URLs and keys on the descriptor that
LIGHTNING_REPORT_FD names. Both are read and closed before the agent runs, so that its tools do not
get them. The script needs only the standard library, from Python 3.8 on.
"""

import os
import sys

if __name__ == "__main__":
    # The agent may have modules with the names of those in this directory.
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]

import asyncio
import functools
import importlib.util
import inspect
import json
import socket
import traceback
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

MAX_MEMBERS = 1000  # errors of a group to inspect
MAX_CHAIN = 20  # errors in a chain of causes
MAX_TEXT = 200  # characters of a value that is no number

_HTTPX = frozenset({"NetworkError", "TimeoutException", "RemoteProtocolError", "ProxyError"})
# Client errors for an incomplete response, by package. Subclasses count too. Classes are matched by
# name, so that none of these packages is imported.
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
# Exceptions among their subclasses: an error status, and a limit of the client itself.
NO_CONNECTION_ERRORS = {
    "urllib": {"HTTPError"},
    "httpx": {"PoolTimeout"},
    "httpx2": {"PoolTimeout"},
}


class Prompts(dict):
    """Replacement for `lightning_jax.types.Prompts`."""

    def __missing__(self, name: str) -> str:
        names = ", ".join(sorted(self)) or "none"
        raise KeyError(f"no prompt {name!r} in the settings; add prompts.{name} (found: {names})")


class LLM:
    """Replacement for `lightning_jax.types.LLM`."""

    def __init__(self, urls: Mapping) -> None:
        self.base_url, self.api_key = urls["base_url"], urls["api_key"]
        self.calls_url, self.calls_key = urls["calls_url"], urls["calls_key"]
        self.model = os.environ["OPENAI_MODEL"]
        self.prompts = Prompts(json.loads(os.environ.get("LIGHTNING_PROMPTS", "{}")))

    def calls_only(self) -> "LLM":
        """Return the settings with which only calls count."""
        return LLM(
            {
                "base_url": self.calls_url or self.base_url,
                "api_key": self.calls_key or self.api_key,
                "calls_url": self.calls_url,
                "calls_key": self.calls_key,
            }
        )


def load(reference: str) -> Any:
    """Return the function that FILE:FUNCTION names, or exit if there is none."""
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


def with_options(function: Any, options: dict) -> Any:
    """Return the function with keyword arguments, or exit if it does not take them."""
    try:
        inspect.signature(function).bind(None, None, **options)
    except TypeError as error:
        sys.exit(f"it cannot be called with (task, llm) and agent.options: {error}")
    except ValueError:  # a builtin may have no signature
        pass
    return functools.partial(function, **options) if options else function


def module_name_of(path: str, otherwise: str) -> str:
    """Return the module name under which to load the file.

    This is the file's own name if importing it would load the file and it is not loaded yet.
    Processes that the agent starts can then import it too. Otherwise return `otherwise`.
    """
    name = os.path.splitext(os.path.basename(path))[0]
    if name in sys.modules or not name.isidentifier():
        return otherwise
    spec = importlib.util.find_spec(name)
    origin = spec and spec.origin and os.path.realpath(spec.origin)
    return name if origin == os.path.realpath(path) else otherwise


def run(function: Any, channel: int) -> None:
    """Run the agent, write what it returned or raised, and exit.

    Threads and tasks that the agent left running are not waited for.
    """
    join_trace()
    os.set_inheritable(channel, False)  # what a tool writes there would be the agent's result
    task = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with open(int(os.environ.pop("LIGHTNING_REPORT_FD"))) as file:
        llm = LLM(json.load(file))
    try:
        report = {"result": plain_result(answer(function, task, llm))}
    except Exception as error:  # noqa: BLE001  (foreign code: `program.py` raises it again)
        traceback.print_exc()
        errors = members(error)
        faults = faults_of(errors)
        first = (faults or errors)[0]
        report = {
            "error": type(first).__name__,
            "message": words_of(first)[:2000],
            "is_connection": not faults,
            "addresses": [address_of(error) for error in errors[:100]],
        }
    os.ftruncate(channel, 0)
    os.lseek(channel, 0, os.SEEK_SET)
    with os.fdopen(channel, "w") as file:
        file.write(json.dumps(report))
    flush_spans()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def members(error: BaseException) -> list:
    """Return the errors in a group, such as a task group raises, or [error] if it is not a group.

    Nested groups are flattened. Members that were only cancelled are left out if there are others.
    """
    singles, unseen, seen = [], [error], set()
    while unseen and len(singles) < MAX_MEMBERS:
        member = unseen.pop()
        if id(member) in seen:
            continue
        seen.add(id(member))
        inside = value_of(member, "exceptions")  # in Python's groups and older libraries'
        nested = inside if isinstance(inside, (list, tuple)) else ()
        errors = [one for one in reversed(nested) if isinstance(one, BaseException)]
        unseen += errors
        if not errors:
            singles.append(member)
    others = [one for one in singles if not issubclass(type(one), asyncio.CancelledError)]
    return others or singles or [error]


def faults_of(errors: list) -> list:
    """Return the errors that are not connection errors and were not raised because of one."""
    return [member for member in errors if not any(map(is_connection_error, chain(member)))]


def chain(error: BaseException) -> list:
    """Return the error and the errors that caused it or were being handled when it was raised."""
    errors = []
    following = error
    while following is not None and len(errors) < MAX_CHAIN:
        errors.append(following)
        hidden = following.__suppress_context__
        following = following.__cause__ or (None if hidden else following.__context__)
    return errors


def is_connection_error(error: BaseException) -> bool:
    """Return True if the error's type means that a client got no complete response.

    A client's own timeout counts. A `TimeoutError` that the agent set itself does not.
    """
    kind = type(error)
    if issubclass(kind, (ConnectionError, socket.gaierror)):
        return True
    for base in kind.__mro__:
        package = str(base.__module__).partition(".")[0]
        if base.__name__ in NO_CONNECTION_ERRORS.get(package, ()):
            return False
        if base.__name__ in CONNECTION_ERRORS.get(package, ()):
            # urllib also raises URLError for an unknown scheme.
            return package != "urllib" or isinstance(getattr(error, "reason", None), OSError)
    return False


def address_of(error: BaseException) -> Any:
    """Return HOST:PORT of the server that the failed request was for, or None if unknown."""
    for cause in chain(error):
        request = value_of(cause, "request")
        address = urlsplit(str(value_of(request, "url") or "")).netloc
        owner = cause if value_of(cause, "port") else value_of(cause, "pool")
        if not address and value_of(owner, "host") and value_of(owner, "port"):
            address = "{}:{}".format(value_of(owner, "host"), value_of(owner, "port"))
        if address:
            return address
        if isinstance(value_of(cause, "lightning_address"), str):
            return cause.lightning_address  # type: ignore[attr-defined]
    return None


def value_of(holder: Any, name: str) -> Any:
    """Return an attribute of a foreign object, or None if it is missing or raises."""
    try:
        return getattr(holder, name, None)
    except Exception:  # noqa: BLE001
        return None


def words_of(error: BaseException) -> str:
    """Return the error's message, or "" if foreign code fails to produce it."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001
        return ""


def answer(function: Any, task: Any, llm: LLM) -> Any:
    """Return the agent's result for the task.

    A plain function runs without an event loop, so it may start one.
    """
    result = function(task, llm)
    if inspect.isawaitable(result):
        return asyncio.new_event_loop().run_until_complete(result)
    return result


def join_trace() -> None:
    """Make the agent's OpenTelemetry spans, if any, children of the rollout's span."""
    if "opentelemetry" in sys.modules and "TRACEPARENT" in os.environ:
        from opentelemetry import context, propagate

        context.attach(propagate.extract({"traceparent": os.environ["TRACEPARENT"]}))


def flush_spans() -> None:
    """Send the spans that OpenTelemetry still holds, if the agent uses it."""
    trace = sys.modules.get("opentelemetry.trace")
    flush = getattr(trace.get_tracer_provider(), "force_flush", None) if trace else None
    if flush:
        flush(5000)


def plain_result(result: Any) -> Any:
    """Return what the run reads of a result: a number, or the numbers in a mapping.

    Other values become a short text, which is not a reward.
    """
    if isinstance(result, Mapping):
        return {str(name): plain(result[name]) for name in result}
    return plain(result)


def plain(value: Any) -> Any:
    """Return a number or None as it is, a 0-d array as its number, and anything else as a text."""
    try:
        if getattr(value, "ndim", None) == 0:
            value = value.item()
        if value is None or isinstance(value, (int, float)):
            return value
        return (value if isinstance(value, str) else repr(value))[:MAX_TEXT]
    except Exception:  # noqa: BLE001  (foreign code, such as an array without a value)
        return f"a {type(value).__name__}"


if __name__ == "__main__":
    FUNCTION = with_options(load(sys.argv[1]), json.loads(os.environ["LIGHTNING_OPTIONS"]))
    if len(sys.argv) > 2:
        run(FUNCTION, int(sys.argv[2]))
