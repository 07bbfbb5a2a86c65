"""Peak rates of accelerators, from the data sheets of their makers."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Accelerator:
    """Peak rates of one device."""

    kind: str  # pattern of the name by which JAX knows it
    flops: float  # operations per second in bfloat16 with float32 sums, dense
    bandwidth: int  # bytes of its memory per second


# GPUs are those on NVIDIA's own boards (SXM); cards for PCIe are slower.
ACCELERATORS = {
    "a100": Accelerator(r"\bA100\b(?!.*(PCIe|40GB))", 312e12, 2_039_040_000_000),
    "h100": Accelerator(r"\bH100\b(?!.*(PCIe|NVL))", 989e12, 3_352_320_000_000),
    "h200": Accelerator(r"\bH200\b(?!.*NVL)", 989e12, 4_800_000_000_000),
    "v5e": Accelerator(r"TPU v5 ?(lite|e)\b", 197e12, 819_000_000_000),
    "v6e": Accelerator(r"TPU v6 ?(lite|e)\b", 918e12, 1_640_000_000_000),
}


def find_accelerator(device_kind: str) -> Accelerator | None:
    """Return the rates of a device by JAX's name for it, or None if they are not known."""
    matches = (one for one in ACCELERATORS.values() if re.search(one.kind, device_kind, re.I))
    return next(matches, None)
