"""Tests of packages that are not always installed."""

from pathlib import Path
from types import ModuleType

import pytest
from coded import raises_coded

from lightning_jax.errors import UserError
from lightning_jax.settings.loading import import_optional, is_installed


def test_missing_package_is_one_sentence() -> None:
    with raises_coded(UserError, "not_installed", "no-such-package") as caught:
        import_optional("no_such_package.module", "no-such-package>=1")
    assert "pip install 'no-such-package>=1'" in str(caught.value)


def test_installed_module_is_returned() -> None:
    assert isinstance(import_optional("json.decoder", "json"), ModuleType)


def test_a_folder_is_not_the_package_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no_such_package").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert is_installed("json") and not is_installed("no_such_package")
    with raises_coded(UserError, "not_installed", "no-such-package"):
        import_optional("no_such_package", "no-such-package")
