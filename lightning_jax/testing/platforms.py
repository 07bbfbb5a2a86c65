"""Lowering of programs for devices that the machine does not have."""

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
