"""Tests of the settings of a cluster."""

import pytest
from coded import raises_coded

from lightning_jax.cluster.ray_session import actor_options
from lightning_jax.errors import FieldError
from lightning_jax.settings import load_config
from lightning_jax.train.config import ClusterConfig, Config


@pytest.mark.parametrize("address", ["auto", "local", "10.0.0.1:6379", "head.example:6379"])
def test_addresses(address: str) -> None:
    assert ClusterConfig(address=address, samplers=1).address == address


@pytest.mark.parametrize("address", ["ray://head:10001", "head", "http://head:6379", ":6379"])
def test_an_address_that_is_none(address: str) -> None:
    with raises_coded(FieldError, "invalid", "address"):
        ClusterConfig(address=address, samplers=1)


def test_samplers_and_an_address_need_each_other() -> None:
    with raises_coded(FieldError, "conflict", "samplers"):
        ClusterConfig(address="auto")
    with raises_coded(FieldError, "conflict", "samplers"):
        ClusterConfig(samplers=1)
    with raises_coded(FieldError, "conflict", "samplers"):
        ClusterConfig(workers=1)
    with raises_coded(FieldError, "conflict", "trainers"):
        ClusterConfig(trainers=2)
    assert ClusterConfig("auto", workers=1).samplers == 0


def test_resources_and_variables_are_checked() -> None:
    with raises_coded(FieldError, "out_of_range", "sampler_resources.GPU"):
        ClusterConfig("local", 1, sampler_resources={"GPU": 0.0})
    with raises_coded(FieldError, "out_of_range", "worker_resources.CPU"):
        ClusterConfig("local", workers=1, worker_resources={"CPU": -1.0})
    with raises_coded(FieldError, "invalid", "sampler_env"):
        ClusterConfig("local", 1, sampler_env=("XLA_FLAGS",))


def test_named_resources_replace_the_default() -> None:
    words = ["cluster.address=local", "cluster.samplers=1", "cluster.sampler_resources={GPU: 1}"]
    cluster = load_config(Config, words).cluster
    assert cluster.resources("sampler") == {"GPU": 1.0}
    assert cluster.resources("worker") == cluster.resources("trainer") == {"CPU": 1.0}


def test_resources_as_ray_has_them() -> None:
    found = actor_options({"GPU": 2.0, "memory": 1e9, "TPU": 4.0})
    assert found == {"num_cpus": 0.0, "num_gpus": 2.0, "memory": 1e9, "resources": {"TPU": 4.0}}
