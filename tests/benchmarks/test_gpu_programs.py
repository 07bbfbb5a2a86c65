"""Tests of the counts of GPU programs, on small dumps written by hand."""

import re

from gpu_programs import (
    Product,
    count_branches,
    count_calls,
    outside_graphs,
    products_of,
    read_thunks,
)

# Two kernels in a graph, a branch with a graph and a kernel, and a loop of known length.
DUMP = """\
000: kCommandBuffer
  000: kKernel fusion
  001: kGemm dot
001: kConditional cond

  branch 0:
    000: kKernel other
  branch 1:
    000: kCommandBuffer
      000: kKernel inner
002: kWhile while
condition:
    000: kKernel compare
  body:
    000: kKernel last
"""
PROGRAM = """\
module @jit_add {
  func.func public @main(%arg0: tensor<4x8xf32>) -> tensor<4x2xf32> {
    %0 = call @layer(%arg0) : (tensor<4x8xf32>) -> tensor<4x2xf32>
    %1 = call @layer(%arg0) : (tensor<4x8xf32>) -> tensor<4x2xf32>
    %2 = stablehlo.custom_call @kernel(%1) : (tensor<4x2xf32>) -> tensor<4x2xf32>
    return %2 : tensor<4x2xf32>
  }
  func.func private @layer(%arg0: tensor<4x8xf32>) -> tensor<4x2xf32> {
    %0 = stablehlo.custom_call @kernel(%arg0) : (tensor<4x8xf32>) -> tensor<4x8xf32>
    %1 = stablehlo.custom_call @kernel(%0) : (tensor<4x8xf32>) -> tensor<4x8xf32>
    return %1 : tensor<4x2xf32>
  }
}
"""
PRODUCTS = """\
    %5 = stablehlo.dot_general %3, %4, contracting_dims = [1] x [0], precision = [DEFAULT, DEFAULT]\
 : (tensor<4x8xf32>, tensor<8x2xf32>) -> tensor<4x2xf32>
  %6 = stablehlo.dot_general %3, %4, batching_dims = [0] x [0], contracting_dims = [2, 3] x [1, 2]\
 : (tensor<5x4x8x3xbf16>, tensor<5x8x3x2xf32>) -> tensor<5x4x2xf32>
"""

BRANCHES = """\
  func.func public @main(%arg0: tensor<i32>) -> tensor<f32> {
    %c = stablehlo.constant dense<1> : tensor<i32>
    %0 = "stablehlo.case"(%c) ({
    %1:2 = "stablehlo.case"(%0) ({
    %2 = "stablehlo.case"(%arg0) ({
    %3 = "stablehlo.if"(%1#1) ({
  func.func private @inner(%c: tensor<i32>) -> tensor<f32> {
    %0 = "stablehlo.case"(%c) ({
"""


def test_branches_on_constants_do_not_count() -> None:
    assert count_branches(BRANCHES) == 2


def test_what_the_host_starts_is_outside_of_graphs() -> None:
    thunks = read_thunks(DUMP)
    assert [thunk.kind for thunk in thunks] == ["CommandBuffer", "Conditional", "While"]
    started = [thunk.kind for thunk in outside_graphs(thunks)]
    branches, loop = ["Kernel", "CommandBuffer"], ["Kernel", "Kernel"]
    assert started == ["CommandBuffer", "Conditional", *branches, "While", *loop]
    assert [inner.kind for inner in thunks[1].inner] == ["Kernel", "CommandBuffer"]


def test_products_have_dtypes_and_operations() -> None:
    # 2 * 8 for each of 4 x 2 results; 2 * 8 * 3 for each of 5 x 4 x 2.
    assert products_of(PRODUCTS) == [
        Product(("f32", "f32"), 2 * 8 * 4 * 2),
        Product(("bf16", "f32"), 2 * 24 * 5 * 4 * 2),
    ]


def test_calls_of_a_function_count_each_time() -> None:
    assert count_calls(PROGRAM, re.compile("custom_call @kernel")) == 2 * 2 + 1
