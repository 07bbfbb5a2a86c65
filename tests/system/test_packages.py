"""Tests of packages that are not always installed."""

from types import ModuleType

from coded import raises_coded

from lightning_jax.errors import UserError
from lightning_jax.system.packages import import_optional


def test_missing_package_is_one_sentence() -> None:
    with raises_coded(UserError, "not_installed", "no-such-package") as caught:
        import_optional("no_such_package.module", "no-such-package>=1")
    assert "pip install 'no-such-package>=1'" in str(caught.value)


def test_installed_module_is_returned() -> None:
    assert isinstance(import_optional("json.decoder", "json"), ModuleType)
