"""Tests of `model.dtype: auto`."""

import pytest
from coded import raises_coded
from log_events import records

from lightning_jax.errors import FieldError
from lightning_jax.models import precision
from lightning_jax.models.config import ModelConfig
from lightning_jax.models.precision import resolve_dtype


def measured(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
    """Fake the measured seconds of float32 and bfloat16. With none given, measuring fails."""
    monkeypatch.setattr(precision, "_seconds", lambda: seconds)


def test_a_cpu_has_what_is_faster_there(monkeypatch: pytest.MonkeyPatch) -> None:
    auto = ModelConfig(dtype="auto", remat="full")
    measured(monkeypatch, 0.004, 0.002)
    assert resolve_dtype(auto, "cpu") == ModelConfig(
        dtype="bfloat16", activation_dtype="float32", remat="full"
    )
    measured(monkeypatch, 0.004, 0.0038)  # not clearly faster
    assert resolve_dtype(auto, "cpu") == ModelConfig(dtype="float32", remat="full")


def test_accelerators_have_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch)
    assert resolve_dtype(ModelConfig(dtype="auto"), "tpu") == ModelConfig(dtype="bfloat16")


def test_what_is_named_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch)
    named = ModelConfig(dtype="bfloat16", activation_dtype="float32")
    assert resolve_dtype(named, "cpu") is named


def test_processes_agree_without_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch)
    monkeypatch.setattr(precision.jax, "process_count", lambda: 2)
    assert resolve_dtype(ModelConfig(dtype="auto"), "cpu").dtype == "float32"


def test_the_measurement_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    chosen = resolve_dtype(ModelConfig(dtype="auto"), "cpu").dtype
    assert chosen in ("float32", "bfloat16")
    (record,) = records(caplog, "dtype_chosen")
    assert (record.dtype, record.product) == (chosen, (512, 576, 1536))


def test_auto_leaves_no_choice_of_activations() -> None:
    with raises_coded(FieldError, "conflict", "activation_dtype"):
        ModelConfig(dtype="auto", activation_dtype="float32")
