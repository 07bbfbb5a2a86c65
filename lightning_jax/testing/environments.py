"""Python environments for programs whose packages are not ours, one a requirements file."""

import subprocess
import sys
from pathlib import Path


def environment(requirements: Path, folder: Path) -> Path:
    """The Python of the environment with these packages; made where it is not there yet.

    It lies in `folder` under the file's name without `requirements-`, and is made anew when the
    file's text has changed. Raises CalledProcessError where a package cannot be installed.
    """
    place = folder / requirements.stem.removeprefix("requirements-")
    ready = place / requirements.name
    if not ready.exists() or ready.read_bytes() != requirements.read_bytes():
        subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
        pip = [place / "bin/python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, "-r", requirements], check=True)
        ready.write_bytes(requirements.read_bytes())
    return place / "bin/python"
