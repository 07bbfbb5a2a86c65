"""Tests of absent devices: requests to their compilers, and errors without one."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from coded import raises_coded
from jax.experimental import topologies

from lightning_jax.cli.main import main
from lightning_jax.settings import ConfigError
from lightning_jax.train.memory import targets
from lightning_jax.train.memory.targets import target_devices

CONFIG = Path(__file__).parents[3] / "experiments" / "configs" / "spider.yaml"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Record requests to the compilers, and answer with two of this machine's devices."""
    calls: list[dict[str, Any]] = []

    def get_topology_desc(**arguments: Any) -> Any:
        calls.append(arguments)
        return topologies.TopologyDescription(jax.devices()[:2])

    monkeypatch.setattr(targets.topologies, "get_topology_desc", get_topology_desc)
    return calls


def test_a_gpu_is_described_to_its_compiler(asked: list[dict[str, Any]]) -> None:
    devices, capacity = target_devices("h200:2")
    assert len(devices) == 2 and capacity == 0.75 * 151397597184
    (call,) = asked
    assert call["platform"] == "cuda" and call["topology"] == "1x1x2"
    assert "core_count: 132" in call["target_config"] and "major: 9 feat" in call["target_config"]
    assert "device_memory_size: 151397597184" in call["target_config"]
    for version in ("driver_version", "runtime_version", "compile_time_toolkit_version"):
        assert f'{version}: "13.0.0"' in call["target_config"]
    target_devices("a100")
    assert asked[1]["topology"] == "1x1x1" and "{ major: 8 }" in asked[1]["target_config"]


def test_a_slice_is_asked_for_by_its_name(asked: list[dict[str, Any]]) -> None:
    assert target_devices("v5e:2x4") == (jax.devices()[:2], None)
    assert asked == [{"platform": "tpu", "topology_name": "v5e:2x4"}]


@pytest.mark.parametrize("target", ["h10", "h100:0", "h100:two", "v5e", "", "h100:-1"])
def test_what_is_no_target_is_refused(target: str) -> None:
    with raises_coded(ConfigError, "unknown", "target") as caught:
        target_devices(target)
    assert repr(target) in str(caught.value)


@pytest.mark.parametrize(
    ("target", "error", "package"),
    [
        ("h100", NotImplementedError("topology not implemented for cuda"), "jax[cuda12]"),
        ("v5e:2x4", RuntimeError("JAX TPU support not installed"), "jax[tpu]"),
    ],
)
def test_without_its_compiler_the_package_is_named(
    target: str, error: Exception, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get_topology_desc(**_: Any) -> Any:
        raise error

    monkeypatch.setattr(targets.topologies, "get_topology_desc", get_topology_desc)
    with raises_coded(ConfigError, "missing", package) as caught:
        target_devices(target)
    assert all(word in str(caught.value) for word in (target, str(error), package))


def test_plan_takes_a_target(
    asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", "--quick", "--config", str(CONFIG), "data.root=DIR", "--target", "h100:2"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "2 x cpu, data=1 fsdp=2 expert=1 tensor=1" in printed
    assert "59.332 GiB" in printed.splitlines()[-1]
    assert main([*command, "--devices", "2"]) == 2
    stderr = capsys.readouterr().err
    assert "--devices" in stderr and "--target" in stderr


@pytest.mark.gpu_compiler
@pytest.mark.usefixtures("h100")
def test_a_training_step_is_compiled_for_a_gpu_that_is_not_here() -> None:
    command = [sys.executable, "-m", "lightning_jax", "plan", "--config", str(CONFIG)]
    command += ["data.root=DIR", "--target", "h100"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "per device of 1 x NVIDIA H100" in done.stdout and "(compiled)" in done.stdout
