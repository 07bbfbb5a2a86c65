"""Which dtype `model.dtype: auto` stands for on the devices that are here."""

import logging
import time
from dataclasses import replace

import jax
import jax.numpy as jnp

from lightning_jax.config_sections import AUTO, ModelConfig
from lightning_jax.models.matmul import matmul

log = logging.getLogger(__name__)

PRODUCT = 512, 576, 1536  # a row of a training batch, through a small model's layer
TURNS = 10
CLEARLY = 0.9  # of float32's time; between the CPUs that were seen lies a factor of two


def settle(model: ModelConfig, platform: str | None = None) -> ModelConfig:
    """`model` with dtypes in place of auto: bfloat16, but on a CPU what is faster of float32 and
    bfloat16 weights beside float32 activations, which is measured (half a second). Some CPUs make
    products of bfloat16 in half of float32's time, others in twice as much. `platform` is
    that of devices elsewhere; None: of those here, which are asked only where dtype is auto.
    """
    if model.dtype != AUTO:
        return model
    if (platform or jax.default_backend()) != "cpu":
        return replace(model, dtype="bfloat16")
    if jax.process_count() > 1:  # each would measure for itself, and they must agree
        return replace(model, dtype="float32")
    return _faster(model, *_seconds())


def _faster(model: ModelConfig, float32_s: float, bfloat16_s: float) -> ModelConfig:
    is_narrow = bfloat16_s < CLEARLY * float32_s
    log.info(
        "model.dtype=auto is %s on this CPU: a product of %d x %d x %d takes %.1f ms in float32 "
        "and %.1f ms in bfloat16",
        "bfloat16, beside float32 activations," if is_narrow else "float32",
        *PRODUCT,
        1e3 * float32_s,
        1e3 * bfloat16_s,
        extra={
            "event": "dtype_chosen",
            "dtype": "bfloat16" if is_narrow else "float32",
            "product": PRODUCT,
        },
    )
    if is_narrow:
        return replace(model, dtype="bfloat16", activation_dtype="float32")
    return replace(model, dtype="float32")


def _seconds() -> tuple[float, float]:
    """Of a product with a kernel in float32 and one in bfloat16: the fastest of some, by turns."""
    rows, narrow, wide = PRODUCT
    x, run = jnp.ones((rows, narrow)), jax.jit(matmul)
    kernels = [jnp.ones((narrow, wide), dtype) for dtype in ("float32", "bfloat16")]
    for kernel in kernels:
        jax.block_until_ready(run(x, kernel))  # compiles
    found = []
    for _ in range(TURNS):
        for kernel in kernels:
            started = time.perf_counter()
            jax.block_until_ready(run(x, kernel))
            found.append(time.perf_counter() - started)
    return min(found[::2]), min(found[1::2])
