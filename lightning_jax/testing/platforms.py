"""Programs for devices that the machine does not have."""

from jax.sharding import AbstractDevice, AbstractMesh, Mesh


def mesh_for(platform: str, mesh: Mesh) -> AbstractMesh:
    """The mesh without its devices; for `cuda` as one of H100s.

    Since 0.11 JAX lowers a Triton kernel only for a GPU that it knows: a process's own, or that of
    the abstract mesh on which the kernel's arrays lie or under which it is traced.
    """
    if platform != "cuda":
        return mesh.abstract_mesh
    gpu = AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="gpu")
    return mesh.abstract_mesh.update(abstract_device=gpu)
