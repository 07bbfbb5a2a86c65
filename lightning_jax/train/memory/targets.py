"""Descriptions of absent devices, for which their compilers can still compile.

A TPU's compiler is libtpu (`pip install libtpu`). A GPU's comes with `jax[cuda12]`, and the extra
`gpu-compiler` has no more than it needs. Neither needs the device. The compiled programs cannot run
here.
"""

import os
from collections.abc import Sequence
from typing import Any

from jax.errors import JaxRuntimeError
from jax.experimental import topologies

from lightning_jax.settings import ConfigError
from lightning_jax.system.accelerators import ACCELERATORS

# Properties that XLA's GPU compiler needs beside the bandwidth of memory, in bytes. From NVIDIA's
# data sheets and from queries of the cards.
_HOPPER = {
    "cuda_compute_capability": "{ major: 9 feature_extension: ACCELERATED_FEATURES }",
    "core_count": 132,
    "fpus_per_core": 128,
    "clock_rate_ghz": 1.98,
    "l2_cache_size": 52428800,
    "shared_memory_per_core": 233472,
    "shared_memory_per_block_optin": 232448,
}
_GPUS: dict[str, dict[str, Any]] = {
    "a100": {
        "cuda_compute_capability": "{ major: 8 }",
        "core_count": 108,
        "fpus_per_core": 64,
        "clock_rate_ghz": 1.41,
        "l2_cache_size": 41943040,
        "shared_memory_per_core": 167936,
        "shared_memory_per_block_optin": 166912,
        "device_memory_size": 85100068864,
    },
    "h100": {
        **_HOPPER,
        "device_memory_size": 84942979072,
    },
    "h200": {
        **_HOPPER,
        "device_memory_size": 151397597184,
    },
}
_ANY_GPU = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "threads_per_core_limit": 2048,
    "shared_memory_per_block": 49152,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
    # Versions of the driver and of CUDA. Without them, XLA puts neither calls of libraries nor
    # branches into CUDA graphs, so a program would launch more than it does on a real GPU.
    **dict.fromkeys(
        ("driver_version", "runtime_version", "compile_time_toolkit_version"), '"13.0.0"'
    ),
}
_JAX_TAKES = 0.75  # share of a GPU's memory that JAX takes by default
EXPECTED = f"one of {', '.join(_GPUS)}, alone or as h100:8, or a TPU slice such as v5e:2x4"


def target_devices(target: str) -> tuple[Sequence[Any], int | None]:
    """Return (devices of a target such as `h100:8` or `v5e:2x4`, bytes of each for arrays).

    The bytes are None if unknown. Raises ConfigError if the target is unknown or its compiler is
    not installed.
    """
    name, _, size = target.partition(":")
    if name in _GPUS:
        number = size or "1"
        if not number.isdecimal() or int(number) < 1:
            raise ConfigError.unknown("target", f"target is {target!r}; expected {EXPECTED}.")
        return _gpus(target, name, int(number)), int(_JAX_TAKES * _GPUS[name]["device_memory_size"])
    if not name.startswith("v") or not size:
        raise ConfigError.unknown("target", f"target is {target!r}; expected {EXPECTED}.")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # else libtpu looks for a TPU on the network
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=target).devices, None
    except RuntimeError as error:
        raise ConfigError.missing(
            "jax[tpu]",
            f"target {target!r} cannot be compiled for ({_line(error)}); use {EXPECTED}, and "
            "install libtpu with pip install 'jax[tpu]'",
        ) from None


def _gpus(target: str, name: str, number: int) -> Sequence[Any]:
    rates = {"memory_bandwidth": ACCELERATORS[name].bandwidth}
    facts = "\n".join(f"{key}: {value}" for key, value in (_ANY_GPU | _GPUS[name] | rates).items())
    described = (
        f"gpu_device_info {{ {facts} }}\n"
        f'platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }}\n'
        f'device_description_str: "NVIDIA {name.upper()}"'  # the name by which JAX knows it
    )
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # the check needs a GPU
    try:
        return topologies.get_topology_desc(
            platform="cuda", topology_name="", topology=f"1x1x{number}", target_config=described
        ).devices
    except (JaxRuntimeError, NotImplementedError) as error:
        raise ConfigError.missing(
            "jax[cuda12]",
            f"target {target!r} cannot be compiled for ({_line(error)}); install the compiler of "
            "JAX's CUDA plugin with pip install 'jax[cuda12]' (no GPU is needed)",
        ) from None


def _line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".")
