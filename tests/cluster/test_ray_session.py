"""Tests of how a session joins a cluster, over a package that stands in for Ray."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from coded import raises_coded

from lightning_jax.cluster.ray_session import TOKEN_VARIABLES, ray_session
from lightning_jax.settings import ConfigError
from lightning_jax.train.config import AUTO_CLUSTER, LOCAL_CLUSTER, ClusterConfig

# Takes the place of Ray, which is not always installed.
STANDIN = """
import os

class AuthenticationError(Exception):
    pass

def init(**settings):
    global seen
    seen = {name: os.environ.get(name) for name in os.environ if name.startswith("RAY_")}
    if os.environ.get("STANDIN_FAILS") == "token":
        raise AuthenticationError("no authentication token was found.\\nPlease provide one")
    if os.environ.get("STANDIN_FAILS"):
        raise Exception("another error of Ray")

def shutdown():
    pass
"""


@pytest.fixture(autouse=True)
def standin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    for name in TOKEN_VARIABLES:
        monkeypatch.setenv(name, "")  # so that the end of the test restores it
        monkeypatch.delenv(name)
    (tmp_path / "ray.py").write_text(STANDIN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("ray", None)


def _join(address: str = LOCAL_CLUSTER) -> ModuleType:
    with ray_session(ClusterConfig(address=address, samplers=1)) as ray:
        return ray


def test_a_cluster_of_the_run_has_a_token_that_no_file_holds() -> None:
    first, second = _join(), _join()
    assert first.seen["RAY_AUTH_MODE"] == "token" and len(first.seen["RAY_AUTH_TOKEN"]) == 64
    assert second.seen["RAY_AUTH_TOKEN"] == os.environ["RAY_AUTH_TOKEN"]  # Ray remembers the first


@pytest.mark.parametrize("name", TOKEN_VARIABLES)
def test_what_the_user_has_chosen_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "chosen")
    assert {n: v for n, v in _join().seen.items() if n in TOKEN_VARIABLES} == {name: "chosen"}


def test_the_token_of_another_cluster_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "RAY_AUTH_TOKEN" not in _join(AUTO_CLUSTER).seen
    monkeypatch.setenv("STANDIN_FAILS", "token")
    with raises_coded(ConfigError, "no_token", "RAY_AUTH_TOKEN") as caught:
        _join(AUTO_CLUSTER)
    assert str(caught.value).isprintable()


def test_any_error_of_ray_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_FAILS", "yes")
    with raises_coded(ConfigError, "not_joined", "cluster.address"):
        _join(AUTO_CLUSTER)
