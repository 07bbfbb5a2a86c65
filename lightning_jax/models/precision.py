"""Choice of the dtype for `model.dtype: auto` on the local devices."""

import logging
import time
from dataclasses import replace

import jax
import jax.numpy as jnp

from lightning_jax.models.blocks.matmul import matmul
from lightning_jax.models.config import AUTO, ModelConfig

log = logging.getLogger(__name__)

PRODUCT = 512, 576, 1536  # a row of a training batch times a kernel of a small model
TURNS = 10
MAX_TIME_SHARE = 0.9  # of float32's time, for bfloat16 to be chosen; CPUs differ by a factor of two


def resolve_dtype(model: ModelConfig, platform: str | None = None) -> ModelConfig:
    """Return `model` with dtype auto replaced.

    The replacement is bfloat16 on an accelerator. On a CPU, measure for half a second and take the
    faster of float32 and bfloat16 weights with float32 activations. Some CPUs multiply bfloat16 in
    half of float32's time, others in twice that time. Pass `platform` for devices on another
    machine. With None, the local devices are queried, but only if dtype is auto.
    """
    if model.dtype != AUTO:
        return model
    if (platform or jax.default_backend()) != "cpu":
        return replace(model, dtype="bfloat16")
    if jax.process_count() > 1:  # processes must agree, but each would measure for itself
        return replace(model, dtype="float32")
    return _faster(model, *_seconds())


def _faster(model: ModelConfig, float32_s: float, bfloat16_s: float) -> ModelConfig:
    is_narrow = bfloat16_s < MAX_TIME_SHARE * float32_s
    log.info(
        "model.dtype=auto resolves to %s on this CPU: a product of %d x %d x %d takes %.1f ms in "
        "float32 and %.1f ms in bfloat16",
        "bfloat16 with float32 activations" if is_narrow else "float32",
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
    """Time a product with a float32 and with a bfloat16 kernel, in seconds.

    The two take turns, and each result is the fastest of its runs.
    """
    rows, narrow, wide = PRODUCT
    x, run = jnp.ones((rows, narrow)), jax.jit(matmul)
    kernels = [jnp.ones((narrow, wide), dtype) for dtype in ("float32", "bfloat16")]
    for kernel in kernels:
        jax.block_until_ready(run(x, kernel))  # compiles
    seconds = []
    for _ in range(TURNS):
        for kernel in kernels:
            started = time.perf_counter()
            jax.block_until_ready(run(x, kernel))
            seconds.append(time.perf_counter() - started)
    return min(seconds[::2]), min(seconds[1::2])
