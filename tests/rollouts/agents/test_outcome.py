"""Tests of outcomes: an agent's result or error fails only its rollout, with the right blame."""

import asyncio
import errno
import json
import socket
import urllib.error
from http.client import IncompleteRead
from typing import Any

import aiohttp
import httpx
import numpy as np
import openai
import pytest

from lightning_jax.gateway.sessions.open_rollouts import Traffic
from lightning_jax.rollouts.agents.outcome import (
    DROPPED_METRICS,
    MAX_METRIC_NAME,
    MAX_REASON,
    LostGateway,
    Outcome,
    final_outcome,
    kept_metrics,
    outcome_of,
    outcome_of_error,
)
from lightning_jax.rollouts.config import RolloutConfig
from lightning_jax.types import LLM

LLM_HERE = LLM("http://127.0.0.1:8123/rollout/r~x/v1", "key", "policy")
HERE: Any = httpx.Request("POST", "http://127.0.0.1:8123/rollout/r~x/v1/chat/completions")
OTHER_REQUEST: Any = httpx.Request("POST", "http://127.0.0.1:9000/search")
RESPONSE: Any = httpx.Response(400, request=OTHER_REQUEST)


def _made(package: str, name: str, *bases: type) -> type:
    """Return a class as defined in a client's package."""
    return type(name, bases or (Exception,), {"__module__": f"{package}.exceptions"})


def _raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:  # noqa: BLE001
        return caught


def _while_handling(error: BaseException, first: BaseException) -> BaseException:
    try:
        try:
            raise first
        except BaseException:  # noqa: BLE001
            raise error  # noqa: B904
    except BaseException as caught:  # noqa: BLE001
        return caught


_REQUESTS = _made("requests", "ConnectionError", OSError)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError("no"),
        socket.gaierror(-3, "no name"),
        openai.APIConnectionError(request=OTHER_REQUEST),
        openai.APITimeoutError(OTHER_REQUEST),
        httpx.ConnectError("no", request=OTHER_REQUEST),
        httpx.ReadTimeout("late"),
        httpx.RemoteProtocolError("torn"),
        aiohttp.ServerDisconnectedError(),
        aiohttp.ServerTimeoutError(),
        aiohttp.ClientPayloadError("torn"),
        urllib.error.URLError(ConnectionRefusedError("no")),
        urllib.error.URLError(TimeoutError("timed out")),
        IncompleteRead(b""),
        _REQUESTS("no"),
        _made("requests", "ConnectTimeout", _made("requests", "Timeout"))("late"),
        _made("urllib3", "ReadTimeoutError", _made("urllib3", "TimeoutError"))("late"),
        _made("anthropic", "APIConnectionError")("no"),
        _made("google.api_core", "ServiceUnavailable")("no"),
        _made("httpx2", "ConnectError", _made("httpx2", "NetworkError"))("no"),
        _raised(RuntimeError("the tool failed"), httpx.ConnectError("no")),
        _while_handling(KeyError("x"), ConnectionResetError("no")),
        ExceptionGroup("a", [httpx.ConnectError("no"), ExceptionGroup("b", [_REQUESTS("no")])]),
        BaseExceptionGroup("a", [asyncio.CancelledError(), ConnectionError("no")]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_lost_connection_is_infrastructure(error: BaseException) -> None:
    outcome = outcome_of_error(error, LLM_HERE)
    assert outcome.status == "infrastructure_failure" and outcome.reward is None
    assert not isinstance(outcome, LostGateway)


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError(),
        KeyError("x"),
        httpx.UnsupportedProtocol("ftp"),
        httpx.PoolTimeout("all busy"),
        httpx.HTTPStatusError("500", request=OTHER_REQUEST, response=httpx.Response(500)),
        openai.BadRequestError("no", response=RESPONSE, body=None),
        aiohttp.InvalidURL("x"),
        urllib.error.URLError("unknown url type: x"),
        urllib.error.HTTPError("http://x", 500, "no", {}, None),  # type: ignore[arg-type]
        _made("mine", "APIConnectionError")("no"),
        _raised(KeyError("x"), None),
        ExceptionGroup("a", [httpx.ConnectError("no"), KeyError("x")]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_other_errors_are_the_agents(error: BaseException) -> None:
    assert outcome_of_error(error, LLM_HERE).status == "agent_failure"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("can't start new thread"),
        OSError(errno.EMFILE, "Too many open files"),
        _raised(ValueError("no answer"), MemoryError("Unable to allocate 3 GiB")),
        ExceptionGroup("a", [MemoryError(), httpx.ConnectError("no")]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_machine_that_lacks_something_is_never_a_reward(error: BaseException) -> None:
    outcome = outcome_of_error(error, LLM_HERE)
    assert (outcome.status, outcome.reward) == ("infrastructure_failure", None)


@pytest.mark.parametrize(
    "error",
    [
        openai.APITimeoutError(HERE),
        httpx.ConnectError("no", request=HERE),
        _raised(RuntimeError("x"), openai.APIConnectionError(request=HERE)),
        ExceptionGroup("a", [ConnectionError("no"), httpx.ReadTimeout("late", request=HERE)]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_lost_connection_to_the_gateway_is_known_as_such(error: BaseException) -> None:
    assert isinstance(outcome_of_error(error, LLM_HERE), LostGateway)


class _NoWords(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


class _Text(str):
    def strip(self, *_: Any) -> str:
        raise ValueError

    def __getitem__(self, _: Any) -> str:
        raise ValueError


class _OddWords(Exception):
    def __str__(self) -> str:
        return _Text("words")


class _NoType(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise ValueError


class _Nameless(Exception, metaclass=_NoType):
    pass


class _Endless(ExceptionGroup):
    """Group that contains itself."""

    @property
    def exceptions(self) -> tuple[Exception, ...]:  # type: ignore[override]
        return (self,)


def _nested(depth: int) -> BaseException:
    error: BaseException = KeyError()
    for _ in range(depth):
        error = BaseExceptionGroup[BaseException]("", [error])
    return error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ExceptionGroup("", [ValueError(), KeyError()]), "ValueError"),
        (BaseExceptionGroup("", [GeneratorExit()]), "GeneratorExit"),
        (BaseExceptionGroup("", [asyncio.CancelledError()]), "CancelledError"),
        (GeneratorExit(), "GeneratorExit"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (SystemExit(3), "SystemExit"),
        (BaseExceptionGroup("", [SystemExit(3)]), "SystemExit"),
        (_NoWords(), "_NoWords"),
        (_OddWords(), "_OddWords"),
        (_Nameless(), "unreadable_error"),
        (_Endless("", [KeyError()]), "_Endless"),
        (_nested(5000), "KeyError"),
        (type("N" * 9999, (Exception,), {})(), "N" * MAX_REASON),
        (ValueError("w" * 10**6), "ValueError"),
    ],
)
def test_whatever_is_raised_has_a_reason_and_words(error: BaseException, reason: str) -> None:
    outcome = outcome_of_error(error, LLM_HERE)
    assert (outcome.status, outcome.reason) == ("agent_failure", reason)
    assert outcome.detail and len(outcome.detail) <= 500


def test_numbers_of_numpy_are_rewards_and_metrics() -> None:
    result = {
        "reward": np.float32(0.5),
        "right": np.bool_(True),
        "n": np.int64(3),
        "a": np.array(2),
    }
    assert outcome_of(result) == Outcome("scored", 0.5, metrics={"right": 1.0, "n": 3.0, "a": 2.0})
    assert outcome_of(np.array([1.0])).reason == "bad_reward"
    assert outcome_of(np.float32("nan")).reason == "bad_reward"
    assert outcome_of({"reward": 1, "\ud83d": 2}).metrics == {"\\ud83d": 2.0}


class _Growing(float):
    def __float__(self) -> float:
        return float("inf")


@pytest.mark.parametrize(
    "result", [1e308, -1e308, 1.1e6, 10**400, float("inf"), _Growing(0.5), {"reward": 1e307}]
)
def test_a_reward_over_the_limit_fails_the_agent(result: Any) -> None:
    outcome = outcome_of(result)
    assert (outcome.status, outcome.reason) == ("agent_failure", "bad_reward")
    assert outcome.reward is None


def test_the_limit_of_rewards_is_a_setting() -> None:
    config = RolloutConfig(max_abs_reward=2.0)
    assert outcome_of(2.0, config=config).reward == 2.0
    assert "rollout.max_abs_reward" in (outcome_of(3, config=config).detail or "")


class _Broken:
    ndim = 0

    def item(self) -> float:
        raise RuntimeError("a tensor without data")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "null"),
        (float("nan"), "not_finite"),
        (np.float32("-inf"), "not_finite"),
        ("judge said ok", "wrong_type"),
        ([0.5], "wrong_type"),
        ({"f1": 0.5}, "wrong_type"),
        (np.zeros(2), "wrong_type"),
        (1j, "wrong_type"),
        (_Broken(), "wrong_type"),
        (1e308, "too_large"),
        (10**400, "too_large"),
    ],
)
def test_a_metric_without_a_value_costs_only_itself(value: Any, reason: str) -> None:
    for reward, status in ((1.0, "scored"), (None, "agent_failure")):  # None: it may be posted
        outcome = outcome_of({"f1": value, "reward": reward, "em": 0.5})
        assert (outcome.status, outcome.reward) == (status, reward)
        assert outcome.metrics == {"em": 0.5, f"dropped_metrics/{reason}/f1": 1.0}


def test_a_metric_with_an_odd_name_costs_only_itself() -> None:
    outcome = outcome_of({"reward": 1.0, ("f1", 2): 0.5, 3: 1.0, "em": 0.5})
    assert (outcome.status, outcome.metrics) == ("scored", {"em": 0.5, DROPPED_METRICS: 2.0})


def test_metrics_that_were_kept_once_are_kept_again() -> None:
    odd = {"x" * MAX_METRIC_NAME: None, "y" * 101: 1.0, "f1": 0.5, "n": float("nan"), "z": 1.0}
    once = kept_metrics(odd, 4)
    assert len(once) == 4 and once[DROPPED_METRICS] == 2.0
    assert kept_metrics(once, 4) == once


def test_metrics_over_the_limit_are_counted() -> None:
    result = {"reward": 0.5} | {f"m{number}": 1.0 for number in range(100_000)}
    metrics = outcome_of(result, config=RolloutConfig(max_metrics=7)).metrics
    assert len(metrics) == 8 and metrics[DROPPED_METRICS] == 99_993
    long = outcome_of({"reward": 0.5, "n" * (MAX_METRIC_NAME + 1): 1.0, "f1": 0.5}).metrics
    assert long == {"f1": 0.5, DROPPED_METRICS: 1.0}


def test_an_error_says_where_the_agent_raised_it() -> None:
    def agent() -> None:
        int("x")  # raised in no file of Python or of the package

    def reads_json() -> None:
        json.loads("{")

    for function in (agent, reads_json):
        try:
            function()
        except ValueError as error:
            found = outcome_of_error(error, LLM_HERE)
            line = function.__code__.co_firstlineno + 1
            assert f"{__file__}:{line} in {function.__name__}" in (found.detail or "")


@pytest.mark.parametrize(
    ("num_refused", "loss", "reason"),
    [(19, None, None), (20, None, "context_length"), (20, "died", "server_lost")],
)
def test_too_many_long_prompts_end_a_rollout_whatever_it_returned(
    num_refused: int, loss: str | None, reason: str | None
) -> None:
    config = RolloutConfig(agent_failure_reward=-1.0)
    traffic = Traffic(("draining",), 0, 0, loss=loss, num_refused=num_refused)
    outcome = final_outcome(Outcome("scored", 1.0), traffic, 0.0, config)
    rewards = {None: 1.0, "context_length": -1.0, "server_lost": None}
    assert (outcome.reason, outcome.reward) == (reason, rewards[reason])
