"""Linears of few rows, whose time is that of reading the weight.

Before: `onednn.qlinear_pointwise` with constants behind a prepack node. After, where oneDNN reads weights slowly:
FBGEMM's kernel for the same product, packed, and the epilogue that the other had fused. It is a step of packing, for
eager mode only, since a packed weight is no tensor that a package could hold.
"""

import math
import warnings
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.graph import constant_value, operands, tensor_value
from quantplug.core.pattern import Match, op
from quantplug.lowering.qparams import FULL_RANGE, QD
from quantplug.lowering.rewriting import Rule, absorb, call, fresh_name, replace
from quantplug.lowering.x86.processor import has_amx, kernels_saturate

aten, quantized = torch.ops.aten, torch.ops.quantized
ENGINE = "fbgemm"
# Measured without VNNI (AMD Zen 3): 1 x 4096 x 4096 takes 1.5 instead of 4.9 ms, 8 rows 2.0 instead of 5.9, 16 rows of
# 512 x 1000 0.21 instead of 0.34; from 64 rows on, or with 65,000 weights, oneDNN is as fast.
MOST_ROWS, LEAST_ELEMENTS = 16, 2**19


def reads_slowly() -> bool:
    """Tells whether oneDNN's kernel for many rows reads a weight slower than memory gives it, as AMX and AVX2 do."""
    return (has_amx() or kernels_saturate()) and ENGINE in torch.backends.quantized.supported_engines


def _stream(match: Match) -> str | None:
    node, given = match.root, operands(match.root)
    weight, scales, bias = _constants(given)
    reason = _objection(given, weight)
    if reason is not None:
        return reason
    assert weight is not None
    parameters = (given["x_scale"], given["x_zero_point"])
    x = call(node, QD.dequantize_per_tensor.default, (given["qx"], *parameters, 0, 255, torch.uint8), given["qx"])
    product = call(
        node, _TARGETS[given["post_op_name"] == "relu"], (x, *parameters, _packed(node, weight, scales, bias)), node
    )
    if given["post_op_name"] == "hardtanh":
        product = call(node, aten.hardtanh.default, (product, *given["post_op_args"]), node)
    if given["output_dtype"] != torch.float32:
        dtype = given["output_dtype"]
        to = (given["output_scale"], given["output_zero_point"], *FULL_RANGE[dtype], dtype)
        product = call(node, QD.quantize_per_tensor.default, (product, *to), node, dtype)
    absorb(product, node)
    replace(node, product)
    return None


_TARGETS = (
    quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default,
    quantized.linear_with_input_q_dq_qweight_dq_relu_output_fp32.default,
)


def _constants(given: dict[str, Any]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    weight = operands(given["qw"]).get("weight")
    found = (weight, given["w_scale"], given["bias"])
    return tuple(constant_value(each) if isinstance(each, fx.Node) else None for each in found)  # type: ignore[return-value]


def _objection(given: dict[str, Any], weight: Tensor | None) -> str | None:
    x = tensor_value(given["qx"])
    if weight is None or x is None or x.dtype != torch.uint8 or isinstance(given["x_scale"], fx.Node):
        return "it is no product of uint8 with constants"
    rows = math.prod(x.shape[:-1])
    if not isinstance(rows, int) or not 0 < rows <= MOST_ROWS or weight.numel() < LEAST_ELEMENTS:
        return f"with {rows} rows and {weight.numel()} weights oneDNN is as fast"
    if given["post_op_name"] not in ("none", "relu", "hardtanh") or given["output_dtype"] == torch.bfloat16:
        return "its epilogue is oneDNN's own"
    return None


def _packed(before: fx.Node, weight: Tensor, scales: Tensor | None, bias: Tensor | None) -> fx.Node:
    assert scales is not None
    zeros = torch.zeros(len(scales), dtype=torch.int64)
    chosen = torch.backends.quantized.engine
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantized tensors are on their way out; here one is packed and gone
        integers = torch.quantize_per_channel(weight * scales[:, None], scales.double(), zeros, 0, torch.qint8)
        torch.backends.quantized.engine = ENGINE
        try:
            packed = quantized.linear_prepack(integers, bias)
        finally:
            torch.backends.quantized.engine = chosen
    module = before.graph.owning_module
    assert module is not None
    name = fresh_name(module, "packed")
    setattr(module, name, packed)
    with before.graph.inserting_before(before), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fx would rather have a parameter or a buffer
        return before.graph.get_attr(name)


FEW_ROWS = (Rule(op("onednn::qlinear_pointwise.default"), _stream),)
