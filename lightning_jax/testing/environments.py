"""Virtual environments for programs with other dependencies, one for each requirements file."""

import subprocess
import sys
from pathlib import Path


def environment(requirements: Path, folder: Path) -> Path:
    """Return the Python of the environment with these packages, and create it if necessary.

    It is in `folder`, named like the file without `requirements-`. If the file's text has changed,
    it is created again. Raise CalledProcessError if a package cannot be installed.
    """
    directory = folder / requirements.stem.removeprefix("requirements-")
    ready = directory / requirements.name
    if not ready.exists() or ready.read_bytes() != requirements.read_bytes():
        subprocess.run([sys.executable, "-m", "venv", "--clear", directory], check=True)
        pip = [directory / "bin/python", "-m", "pip", "install", "-q"]
        subprocess.run([*pip, "--disable-pip-version-check", "-r", requirements], check=True)
        ready.write_bytes(requirements.read_bytes())
    return directory / "bin/python"
