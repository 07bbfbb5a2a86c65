"""Tests of products and gradients against numpy, and of a model with transposed kernels."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lightning_jax.models.blocks.matmul import FEW_ROWS, matmul, matmul_turned, turn_kernels
from lightning_jax.models.config import LoraConfig
from lightning_jax.models.lora import adapted_shape
from lightning_jax.models.transformer import forward, init_params, unembed
from lightning_jax.testing.tiny import tiny_model, with_mixers

RANDOM = np.random.default_rng(0)
KERNEL = jnp.asarray(RANDOM.standard_normal((6, 5)), jnp.float32)


def test_the_gradients_are_those_of_a_product():
    x, weight = (jnp.asarray(RANDOM.standard_normal((2, 3, size))) for size in (6, 5))

    def loss(product, x, kernel):
        return (weight * product(x, kernel)).sum()

    ours, usual = (jax.grad(loss, (1, 2))(product, x, KERNEL) for product in (matmul, jnp.matmul))
    for mine, theirs in zip(ours, usual, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("rows", [(1, 1), (2, 7)])  # a CPU doubles a single row
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("devices", [1, 8])
def test_beside_a_bfloat16_kernel_what_goes_in_is_rounded_and_nothing_else(
    devices, dtype, rows, axis, monkeypatch
):
    """Check values and gradients against numpy in float64 with rounded sides.

    The kernel's gradient has the kernel's dtype.
    """
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    x, weight = (RANDOM.standard_normal((*rows, size)).astype(np.float32) for size in (6, 5))
    x = jnp.asarray(x, dtype)
    kernel = KERNEL.astype(jnp.bfloat16)
    rounded = [
        np.asarray(jnp.asarray(side, jnp.bfloat16), np.float64) for side in (x, weight, kernel)
    ]

    @jax.jit
    def loss(x, kernel):
        out = matmul(x, kernel.T if axis else kernel, axis)
        return (weight * out).sum(), out

    (_, out), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(x, kernel)
    assert out.dtype == grads[0].dtype == x.dtype and grads[1].dtype == jnp.bfloat16
    exact = 1e-5 if dtype == "float32" else 2**-7
    np.testing.assert_allclose(
        np.asarray(out, np.float64), rounded[0] @ rounded[2], rtol=exact, atol=exact
    )
    np.testing.assert_allclose(
        np.asarray(grads[0], np.float64), rounded[1] @ rounded[2].T, rtol=exact, atol=exact
    )
    expected = np.einsum("abi,abo->io", *rounded[:2])
    np.testing.assert_allclose(np.asarray(grads[1], np.float64), expected, rtol=2**-8, atol=1e-4)


def test_for_a_bfloat16_kernels_gradient_one_cpu_lays_activations_out_anew(monkeypatch):
    """Check that several devices do not, because a layout is not partitioned like its array.

    Each device would be sent all activations.
    """

    def program(devices):
        monkeypatch.setattr(jax, "device_count", lambda: devices)
        grad = jax.jit(jax.grad(lambda x, kernel: matmul(x, kernel).sum(), 1))
        return grad.lower(jnp.ones((4, 6)), KERNEL.astype(jnp.bfloat16)).as_text()

    assert "LayoutConstraint" in program(1)
    assert "LayoutConstraint" not in program(8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loop_of_gradients_makes_no_copy_of_the_kernel(dtype):
    kernel, inputs = jnp.ones((256, 2048), dtype), jnp.ones((4, 2, 8, 256))

    @jax.jit
    def gradients(kernel, inputs):
        def add(total, x):
            return total + jax.grad(lambda x: (matmul(x, kernel) ** 2).sum())(x), None

        return jax.lax.scan(add, jnp.zeros(inputs.shape[1:]), inputs)[0]

    memory = gradients.lower(kernel, inputs).compile().memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < kernel.nbytes


@pytest.mark.parametrize("rows", [(1, 1), (FEW_ROWS, 1), (2, FEW_ROWS)])  # kernel left, left, right
def test_a_turned_kernel_gives_the_same_product(rows):
    x = jnp.asarray(RANDOM.standard_normal((*rows, 6)))
    out = jax.jit(matmul_turned)(x, KERNEL.T)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, x @ KERNEL, atol=1e-5)


def test_with_few_rows_the_kernel_stays_on_the_left():
    def product_of(rows):
        text = jax.jit(matmul_turned).lower(jnp.ones((rows, 6)), KERNEL.T).as_text()
        return next(line for line in text.splitlines() if "dot_general" in line)

    assert "-> tensor<5x16xf32>" in product_of(16)
    assert f"-> tensor<{FEW_ROWS + 1}x5xf32>" in product_of(FEW_ROWS + 1)


@pytest.mark.parametrize("tied", [True, False])
def test_a_turned_model_says_the_same(tied):
    plain = with_mixers(tiny_model(num_layers=1).config.with_shape(tie_embeddings=tied), bias=True)
    plain = adapted_shape(plain, LoraConfig(rank=2))
    params = init_params(plain, jax.random.key(0))
    params = jax.tree.map(lambda leaf: leaf + 0.01, params)  # biases and adapters count
    turned = turn_kernels(params)
    assert "kernel" not in turned["layers_0"]["q"] and "lora_a" in turned["layers_0"]["q"]
    tokens = positions = jnp.arange(9)[None]

    def logits(params, config):
        hidden, _ = forward(params, config, tokens, positions)
        return unembed(params, config, hidden[0])

    want = logits(params, plain)
    np.testing.assert_allclose(logits(turned, plain.with_execution(turned=True)), want, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_with_float32_activations_a_bfloat16_model_differs_by_its_roundings(tied):
    config = tiny_model(num_layers=2).config.with_shape(tie_embeddings=tied)
    params = init_params(config, jax.random.key(0), jnp.bfloat16)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    tokens = positions = jnp.arange(9)[None]

    @partial(jax.jit, static_argnums=1)
    def logits(params, config):
        hidden, _ = forward(params, config, tokens, positions)
        return hidden, unembed(params, config, hidden[0])

    hidden, found = logits(params, config.with_execution(activation_dtype="float32"))
    (_, want), (low, _) = logits(wide, config), logits(params, config)
    assert hidden.dtype == found.dtype == jnp.float32 and low.dtype == jnp.bfloat16
    error = np.abs(found - want).max() / np.abs(want).max()
    assert 1e-6 < error < 2**-7


def test_an_adapter_of_rank_1_beside_bfloat16_on_multiple_devices():
    x, a, b = jnp.ones((1, 5, 8)), jnp.ones((8, 1), jnp.bfloat16), jnp.ones((1, 6), jnp.bfloat16)
    gradient = jax.grad(lambda b: matmul(matmul(x, a), b).astype(jnp.float32).sum())(b)
    np.testing.assert_array_equal(gradient, np.full((1, 6), 40.0))
