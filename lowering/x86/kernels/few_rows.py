"""Linears of few rows, whose time is that of reading the weight.

Before: `onednn.qlinear_pointwise` with constants behind a prepack node. After, where oneDNN reads weights slowly: a
kernel that reads them as fast as memory gives them, and the epilogue that the other had fused. In eager mode that is
FBGEMM's, which computes the same integers. It takes a packed weight that is no tensor, so compilers get torch's kernel
on bfloat16, whose result is at about 50 dB.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from quantplug.core.graph.editing import call, free_name
from quantplug.core.graph.facts import constant_value, operands, tensor_value
from quantplug.core.patterns.language import Match, op, optional, value
from quantplug.core.patterns.rules import Rule, apply
from quantplug.core.qdq.qparams import FULL_RANGE, QD, IntegerWeight
from quantplug.lowering.processor import has_amx, kernels_saturate
from quantplug.lowering.x86.kernels.weight_only import product_in_half, size_objection

aten, quantized = torch.ops.aten, torch.ops.quantized
ENGINE = "fbgemm"
# Without VNNI (AMD Zen 3) 1 x 4096 x 4096 takes FBGEMM 1.5 instead of oneDNN's 4.9 ms, 8 rows 2.0 instead of 5.9, 16
# rows of 512 x 1000 0.21 instead of 0.34; from 64 rows on, or with 65,000 weights, both take the same. With AVX512-VNNI
# they take the same up to 2 rows, then FBGEMM up to twice as long (Intel Xeon of family 6, model 167). An older Xeon's
# tiles read a weight beyond the second-level cache at half the speed of memory, which those of the newer do not.
ROWS, ROWS_WITH_TILES, LEAST_ELEMENTS = 16, 2, 2**19
# In bfloat16 without VNNI: 1 row 1.6, 4 rows 3.3, 8 rows 6.5 ms. On the newer Xeon 1 row 0.8, where oneDNN takes 0.7.
HALF_ROWS, LEAST_HALF_ELEMENTS = 4, 2**22


def read_faster(graph: fx.Graph) -> None:
    """Puts FBGEMM's kernel in the place of oneDNN's where that is slow here; for a graph that runs in eager mode."""
    if most_rows():
        apply(graph, BY_FBGEMM)


def stream(graph: fx.Graph) -> None:
    """Puts torch's own kernel in the place of oneDNN's where that is slow here; for a graph that is compiled."""
    if kernels_saturate():
        apply(graph, IN_HALF)


def most_rows() -> int:
    """Returns up to how many rows FBGEMM may read a weight faster than oneDNN, in this process."""
    if ENGINE not in torch.backends.quantized.supported_engines:
        return 0
    return ROWS if kernels_saturate() else ROWS_WITH_TILES if has_amx() else 0


def is_read_faster(activation: fx.Node, weight: IntegerWeight) -> bool:
    """Tells whether a static linear of these integers goes to FBGEMM's kernel here, unless oneDNN's ends in more."""
    x = tensor_value(activation)
    return x is not None and size_objection(x, weight, most_rows(), LEAST_ELEMENTS) is None


Given = dict[str, Any]


def _by_fbgemm(match: Match) -> fx.Node | str:
    return _instead(match, _fbgemm, most_rows(), LEAST_ELEMENTS)


def _in_half(match: Match) -> fx.Node | str:
    return _instead(match, _half, HALF_ROWS, LEAST_HALF_ELEMENTS)


def _instead(
    match: Match, product: Callable[[Match, Given, IntegerWeight], fx.Node], most_rows: int, least_elements: int
) -> fx.Node | str:
    """Returns another product for the place of a kernel, or why there is none."""
    given = operands(match.root)
    found = (operands(given["qw"]).get("weight"), given["w_scale"])
    values, scales = (constant_value(node) if isinstance(node, fx.Node) else None for node in found)
    x = tensor_value(given["qx"])
    if values is None or scales is None or x is None or x.dtype != torch.uint8 or isinstance(given["x_scale"], fx.Node):
        return "it is no product of uint8 and constants with parameters that are known"
    if given["post_op_name"] not in _FUNCTIONS or given["output_dtype"] == torch.bfloat16:
        return "it ends in what only oneDNN fuses"
    weight = IntegerWeight(values, scales)
    reason = size_objection(x, weight, most_rows, least_elements)
    return reason or _quantized(match.root, given, product(match, given, weight))


def _fbgemm(match: Match, given: Given, weight: IntegerWeight) -> fx.Node:
    """Inserts the kernel, which takes float32 and quantizes it itself."""
    node, parameters = match.root, (given["x_scale"], given["x_zero_point"])
    x = _real(node, given["qx"], (*parameters, *FULL_RANGE[torch.uint8], torch.uint8))
    has_relu = given["post_op_name"] == "relu"
    args = (x, *parameters, _packed(match, weight))
    product = call(node, _WITH_RELU if has_relu else _PLAIN, args, node, torch.float32)
    return product if has_relu else _activated(node, given, product)


def _real(before: fx.Node, integers: fx.Node, parameters: tuple[Any, ...]) -> fx.Node:
    """Returns the float32 tensor that was quantized to these integers, or else dequantizes them."""
    if integers.target is QD.quantize_per_tensor.default and tuple(integers.args[1:]) == parameters:
        real = integers.args[0]
        found = tensor_value(real) if isinstance(real, fx.Node) else None
        if isinstance(real, fx.Node) and found is not None and found.dtype == torch.float32:
            return real
    return call(before, QD.dequantize_per_tensor.default, (integers, *parameters), integers, torch.float32)


def _half(match: Match, given: Given, weight: IntegerWeight) -> fx.Node:
    node = match.root
    half = call(node, aten.to.dtype, (given["qx"], torch.bfloat16), given["qx"], torch.bfloat16)
    centred = call(node, aten.sub.Tensor, (half, given["x_zero_point"]), half)  # exact: 8 bits
    return _activated(node, given, product_in_half(match, centred, weight.values, weight.scales * given["x_scale"]))


_PLAIN = quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
_WITH_RELU = quantized.linear_with_input_q_dq_qweight_dq_relu_output_fp32.default
_FUNCTIONS = {"none": None, "relu": aten.relu.default, "hardtanh": aten.hardtanh.default}


def _activated(node: fx.Node, given: Given, product: fx.Node) -> fx.Node:
    """Returns a product behind the function that the kernel had fused."""
    function = _FUNCTIONS[given["post_op_name"]]
    if function is None:
        return product
    bounds = given["post_op_args"] if function is aten.hardtanh.default else ()
    return call(node, function, (product, *bounds), product)


def _quantized(node: fx.Node, given: Given, product: fx.Node) -> fx.Node:
    """Returns a float product, quantized if the kernel's result was."""
    dtype = given["output_dtype"]
    if dtype == torch.float32:
        return product
    to = (given["output_scale"], given["output_zero_point"], *FULL_RANGE[dtype], dtype)
    return call(node, QD.quantize_per_tensor.default, (product, *to), product, dtype)


def _packed(match: Match, weight: IntegerWeight) -> fx.Node:
    node, bias = match.root, constant_value(match["bias"]) if "bias" in match else None
    zeros = torch.zeros(len(weight.scales), dtype=torch.int64)
    chosen = torch.backends.quantized.engine
    module = node.graph.owning_module
    assert module is not None
    name = free_name(module, "packed")
    with torch.no_grad(), warnings.catch_warnings(), node.graph.inserting_before(node):
        # Quantized tensors are on their way out: one is made, packed and gone. And fx would rather have a parameter.
        warnings.simplefilter("ignore")
        floats = weight.values * weight.scales[:, None]
        integers = torch.quantize_per_channel(floats, weight.scales.double(), zeros, 0, torch.qint8)
        torch.backends.quantized.engine = ENGINE
        try:
            setattr(module, name, quantized.linear_prepack(integers, bias))
        finally:
            torch.backends.quantized.engine = chosen
        return node.graph.get_attr(name)


_LINEAR = op("onednn::qlinear_pointwise.default", bias=optional(value("bias")))
BY_FBGEMM = (Rule(_LINEAR, _by_fbgemm),)
IN_HALF = (Rule(_LINEAR, _in_half),)
