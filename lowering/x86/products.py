"""Convolutions and linears on integers.

Before: `dequantize -> conv|linear(integer weight, bias)`. After: a oneDNN kernel that takes the integers,
the prepacked weight, and yields float32; the epilogue rules then fuse what follows into it.
The weight stays an int8 constant with a prepack node, since the packed layout depends on the machine.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from quantplug.core.graph import constant_value, operands, rank
from quantplug.core.pattern import Match, Pattern, op, optional, value
from quantplug.lowering.x86.qparams import IntegerWeight, QParams, dequantize, integer_weight, qparams
from quantplug.lowering.x86.rewriting import Rule, absorb, call, constant, replace

onednn = torch.ops.onednn
NO_OUTPUT_QPARAMS = (1.0, 0, torch.float32)
# torch.export cannot serialize an empty list of numbers; the kernels read none of it here
NO_SCALARS = [0.0]
NO_UNARY = ("none", NO_SCALARS, "")

ACTIVATION = dequantize(input=value("integers"), name="dequantize")


def _constants(before: fx.Node, weight: IntegerWeight, name: str) -> tuple[fx.Node, fx.Node, fx.Node]:
    channels = weight.values.shape[0]
    return (
        constant(before, f"{name}_weight", weight.values),
        constant(before, f"{name}_scales", weight.scales),
        constant(before, f"{name}_zero_points", torch.zeros(channels, dtype=torch.int32)),
    )


def _lower_convolution(match: Match) -> str | None:
    node, params = match.root, qparams(match["dequantize"])
    weight = integer_weight(match["weight"])
    geometry = _geometry(node, weight)
    reason = next(
        (found for found in (weight, geometry, _activation_objection(params, conv=True)) if isinstance(found, str)),
        None,
    )
    if reason:
        return reason
    assert isinstance(weight, IntegerWeight)
    assert isinstance(geometry, tuple)
    values, scales, zeros = _constants(node, weight, node.name)
    packed = call(
        node, onednn.qconv_prepack.default, (values, scales, params.scale, params.zero_point, *geometry), node
    )
    packed.meta["val"] = values.meta["val"]
    args = (match["integers"], params.scale, params.zero_point, packed, scales, zeros, match.get("bias"), *geometry)
    kernel = call(node, onednn.qconv_pointwise.default, (*args, *NO_OUTPUT_QPARAMS, *NO_UNARY), node)
    absorb(kernel, node)
    replace(node, kernel)
    return None


def _activation_objection(params: QParams, *, conv: bool) -> str | None:
    if conv and not params.is_static:
        return "convolutions with activation parameters of run time have no kernel here"
    if params.dtype not in (torch.uint8, torch.int8) or (conv and params.dtype != torch.uint8):
        return f"its activation is {params.dtype}, the kernel wants torch.uint8"
    return None


def _geometry(node: fx.Node, weight: IntegerWeight | str) -> tuple[list[int], list[int], list[int], int] | str:
    """Returns stride, padding, dilation and groups as the kernels take them."""
    if isinstance(weight, str):
        return weight
    given, spatial = operands(node), weight.values.dim() - 2
    if given.get("transposed"):
        return "transposed convolutions have no integer kernel in torch's oneDNN operators"
    stride, dilation = (_spread(given[name], spatial) for name in ("stride", "dilation"))
    padding = given["padding"]
    if isinstance(padding, str):
        padding = _named_padding(padding, weight.values.shape[2:], dilation)
    if padding is None:
        return "padding 'same' is uneven for an even kernel size"
    return stride, _spread(padding, spatial), dilation, given["groups"]


def _spread(found: Any, spatial: int) -> list[int]:
    both = [found] if isinstance(found, int) else list(found)
    return both * spatial if len(both) == 1 else both


def _named_padding(name: str, kernel: Any, dilation: list[int]) -> list[int] | None:
    if name == "valid":
        return [0] * len(dilation)
    totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    return None if any(total % 2 for total in totals) else [total // 2 for total in totals]


def _lower_linear(channel_axis: int) -> Callable[[Match], str | None]:
    def lower(match: Match) -> str | None:
        node, params = match.root, qparams(match["dequantize"])
        weight = integer_weight(match["weight"], channel_axis)
        reason = weight if isinstance(weight, str) else _activation_objection(params, conv=False)
        reason = reason or _linear_objection(match, weight)
        if reason:
            return reason
        assert isinstance(weight, IntegerWeight)
        values, scales, zeros = _constants(node, weight, node.name)
        packed = call(node, onednn.qlinear_prepack.default, (values, None), node)
        packed.meta["val"] = values.meta["val"].t()
        kernel_of = onednn.qlinear_pointwise.default if params.is_static else onednn.qlinear_pointwise.tensor
        args = (match["integers"], params.scale, params.zero_point, packed, scales, zeros, match.get("bias"))
        kernel = call(node, kernel_of, (*args, *NO_OUTPUT_QPARAMS, *NO_UNARY), node)
        absorb(kernel, node)
        replace(node, kernel)
        return None

    return lower


def _linear_objection(match: Match, weight: IntegerWeight | str) -> str | None:
    bias = match.get("bias")
    if not isinstance(weight, str) and weight.values.dim() != 2:
        return "its weight is not a matrix"
    if bias is not None and (constant_value(bias) is None or rank(bias) != 1):
        return "its bias is not a constant vector"
    if match.root.target is torch.ops.aten.addmm.default and (
        operands(match.root)["alpha"],
        operands(match.root)["beta"],
    ) != (1, 1):
        return "addmm with alpha or beta other than 1"
    return None


def _product(name: str, activation: str, weight: str, bias: str | None) -> Pattern:
    inputs: dict[str, Any] = {activation: ACTIVATION, weight: value("weight")}
    if bias:
        inputs[bias] = optional(value("bias"))
    return op(name, **inputs)


PRODUCTS = (
    *(Rule(op(name, input=ACTIVATION, weight=value("weight"), bias=optional(value("bias"))), _lower_convolution)
      for name in ("conv1d", "conv2d", "conv3d", "convolution")),
    Rule(op("linear", input=ACTIVATION, weight=value("weight"), bias=optional(value("bias"))), _lower_linear(0)),
    Rule(op("addmm", self=value("bias"), mat1=ACTIVATION, mat2=value("weight")), _lower_linear(1)),
    Rule(op("mm", self=ACTIVATION, mat2=value("weight")), _lower_linear(1)),
    Rule(op("matmul", self=ACTIVATION, other=value("weight")), _lower_linear(1)),
)  # fmt: skip
