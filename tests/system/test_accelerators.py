"""Tests of the table of accelerators."""

import pytest

from lightning_jax.system.accelerators import ACCELERATORS, find_accelerator


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100", "h100"),  # an absent one (targets.py)
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("TPU v5 lite", "v5e"),
        ("TPU v6 lite", "v6e"),
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA GH200 480GB", None),
        ("TPU v5", None),
        ("cpu", None),
    ],
)
def test_accelerators_are_known_by_jaxs_names(kind: str, name: str | None) -> None:
    assert find_accelerator(kind) is (ACCELERATORS[name] if name else None)
