"""Test that the documentation site builds strictly, where mkdocs is installed."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MKDOCS = shutil.which(
    "mkdocs", path=os.pathsep.join([str(ROOT / ".venv-docs/bin"), os.environ.get("PATH", "")])
)


@pytest.mark.skipif(MKDOCS is None, reason="needs mkdocs; `make docs` installs it")
def test_site_builds_without_warnings_or_other_hosts(tmp_path: Path) -> None:
    """docs/site_hooks.py fails the build for a page that loads from another host."""
    done = subprocess.run(
        [str(MKDOCS), "build", "--strict", "--site-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    listed = (tmp_path / "llms.txt").read_text()
    assert "](settings.md)" in listed and (tmp_path / "settings.md").exists()
    assert 'id="lightning_jax.engine.engine.Engine"' in (tmp_path / "python_api.html").read_text()
