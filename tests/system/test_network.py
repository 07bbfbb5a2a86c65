"""Tests of free ports, and of hosts that are exempt from proxies."""

import logging
import socket
import urllib.request
from typing import Any

import httpx
import pytest
import requests
from log_events import events

from lightning_jax.system.network import free_port, go_direct, with_direct_host

HERE, PROXY = "http://127.0.0.1:8000/rollout/x/v1", "http://proxy:3128"


@pytest.mark.parametrize(
    ("before", "url", "expected"),
    [
        ({}, HERE, ["127.0.0.1", "localhost"]),
        ({"NO_PROXY": "a, .b"}, HERE, ["a", ".b", "127.0.0.1", "localhost"]),
        ({"no_proxy": "a"}, "http://10.0.0.2:80/v1", ["a", "10.0.0.2"]),
        ({"no_proxy": "a,127.0.0.1,localhost"}, HERE, ["a", "127.0.0.1", "localhost"]),
        ({"no_proxy": "*"}, HERE, ["*"]),
        ({}, "http://[fd00::1]:80/v1", ["fd00::1"]),
    ],
)
def test_the_host_is_added_once_to_both_variables(
    before: dict[str, str], url: str, expected: list[str]
) -> None:
    once = with_direct_host({"HTTP_PROXY": PROXY, **before}, url)
    assert once["NO_PROXY"].split(",") == once["no_proxy"].split(",") == expected
    assert with_direct_host(once, url) == once
    both = {"HTTP_PROXY": PROXY, "NO_PROXY": "a", "no_proxy": "b"}
    assert with_direct_host(both, HERE) == {
        "HTTP_PROXY": PROXY,
        "NO_PROXY": "a,127.0.0.1,localhost",
        "no_proxy": "b,127.0.0.1,localhost",
    }


def test_without_a_proxy_nothing_is_set() -> None:
    """The system's own proxies of macOS stay, and no client takes the variables for a proxy."""
    assert with_direct_host({}, HERE) == {}
    assert with_direct_host({"NO_PROXY": "a"}, HERE) == {"NO_PROXY": "a"}
    assert "NO_PROXY" in with_direct_host({"all_proxy": PROXY}, HERE)


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"])
@pytest.mark.parametrize("known", [{}, {"NO_PROXY": "corp"}, {"no_proxy": "corp"}])
def test_clients_call_the_host_themselves(
    name: str, known: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("HTTP_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv(variable.lower(), raising=False)
    for variable, value in with_direct_host({name: PROXY, **known}, HERE).items():
        monkeypatch.setenv(variable, value)
    for url in (HERE, HERE.replace("127.0.0.1", "localhost")):
        assert urllib.request.proxy_bypass(httpx.URL(url).host)
        assert requests.utils.should_bypass_proxies(url, None)
        with httpx.Client() as client:
            found: Any = client._transport_for_url(httpx.URL(url))
            assert found is client._transport
            outside: Any = client._transport_for_url(httpx.URL("http://example.com"))
            assert outside is not client._transport


def test_a_process_says_once_that_its_calls_go_direct(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    environment = {"https_proxy": PROXY}
    for _ in range(2):
        go_direct(HERE, environment)
    assert events(caplog) == ["direct_host"] and environment["NO_PROXY"]
    go_direct(HERE, without := {})
    assert events(caplog) == ["direct_host"] and without == {}


def test_port_can_be_bound() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))
