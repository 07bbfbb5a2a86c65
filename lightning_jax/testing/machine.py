"""Virtual environments, and lowering for devices that the machine does not have."""

import subprocess
import sys
from pathlib import Path

from jax.sharding import AbstractDevice, AbstractMesh, Mesh

_DEVICES = {
    "cuda": AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="gpu"),
    "tpu": AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu"),
}


def mesh_for(platform: str, mesh: Mesh) -> AbstractMesh:
    """Return the mesh without its devices, as if they were H100s or v5e chips.

    JAX lowers some kernels only for a device that it knows. That is a device of the process, or the
    one of the abstract mesh that holds the kernel's arrays or under which the kernel is traced.
    """
    if platform not in _DEVICES:
        return mesh.abstract_mesh
    return mesh.abstract_mesh.update(abstract_device=_DEVICES[platform])


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
