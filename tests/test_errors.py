"""Errors are made by their reason."""

import pickle

import pytest

from lightning_jax.errors import InvalidValue
from lightning_jax.settings import ConfigError


@pytest.mark.parametrize("kind", [ConfigError, InvalidValue])
def test_a_reason_makes_an_error_of_its_class(kind: type[ConfigError] | type[InvalidValue]) -> None:
    error = kind.missing("data.root", "data.root is missing; set it.")
    assert type(error) is kind
    assert (error.reason, error.key) == ("missing", "data.root")
    copy = pickle.loads(pickle.dumps(error))  # as between processes
    assert (copy.reason, copy.key, str(copy)) == (error.reason, error.key, str(error))
