"""Convolutions and linears on integers.

Before: `dequantize -> conv|linear(integer weight, bias)`. After: a oneDNN kernel that takes the integers,
the prepacked weight, and yields float32; the epilogue rules then fuse what follows into it.
The weight stays an int8 constant with a prepack node, since the packed layout depends on the machine.
"""

import math
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.graph.editing import call, constant
from quantplug.core.graph.facts import constant_value, likely_sizes, rank, tensor_value
from quantplug.core.graph.meta import PAIR
from quantplug.core.patterns.language import Match, Op, op, optional, value
from quantplug.core.patterns.rules import Rewrite, Rule
from quantplug.core.qdq.limits import largest_pair
from quantplug.core.qdq.qparams import IntegerWeight, QParams, dequantize, integer_weight, qparams
from quantplug.core.specs.limits import ONEDNN_PAIRS
from quantplug.lowering.processor import as_unsigned
from quantplug.lowering.x86.geometry import Geometry, geometry, objection
from quantplug.lowering.x86.kernels.calls import NO_SCALARS
from quantplug.lowering.x86.kernels.few_rows import is_read_faster
from quantplug.lowering.x86.running.autotune import Choice, always_integer

onednn, aten = torch.ops.onednn, torch.ops.aten
NO_OUTPUT_QPARAMS = (1.0, 0, torch.float32)
NO_UNARY = ("none", NO_SCALARS, "")

ACTIVATION = dequantize(input=value("integers"), name="dequantize")


def _constants(before: fx.Node, weight: IntegerWeight, name: str) -> tuple[fx.Node, fx.Node, fx.Node]:
    channels = weight.values.shape[0]
    return (
        constant(before, f"{name}_weight", weight.values),
        constant(before, f"{name}_scales", weight.scales),
        constant(before, f"{name}_zero_points", torch.zeros(channels, dtype=torch.int32)),
    )


def _packed_for(activation: fx.Node) -> list[int] | None:
    """Returns the sizes of an activation that a weight is packed for, None if they are not known.

    The layout of a packed weight depends on them: where a kernel wants another one, it reorders the weight at every
    call, which takes as long as a 3x3 convolution of 512 channels and thirty times a 1x1 convolution of 96.
    """
    return list(likely_sizes(activation)) or None


def _sizes(activation: fx.Node) -> tuple[Any, ...]:
    found = tensor_value(activation)
    return () if found is None else tuple(found.shape)


def _as_matrix(sizes: list[int] | None) -> list[int] | None:
    return None if sizes is None else [math.prod(sizes[:-1]), sizes[-1]]


def _lower_convolution(choose: Choice) -> Rewrite:
    def lower(match: Match) -> fx.Node | str:
        weight, params = integer_weight(match["weight"]), qparams(match["dequantize"])
        found = _geometry(match, weight)
        checks = (weight, found, activation_objection(params, weight, conv=True))
        reason = next((check for check in checks if isinstance(check, str)), None)
        if reason:
            return reason
        assert isinstance(weight, IntegerWeight)
        assert isinstance(found, tuple)
        reason = _measured_convolution(choose, match, weight, found)
        if reason:
            return reason
        return convolve(match, weight, found)

    return lower


def convolve(match: Match, weight: IntegerWeight, geometry: Geometry) -> fx.Node:
    """Returns the kernel of a convolution for the place of a match's root; it yields float32.

    Args:
        match: binds "integers", their "dequantize" and perhaps "bias".
        weight: output channels first.
        geometry: stride, padding, dilation, groups.
    """
    node, params = match.root, qparams(match["dequantize"])
    values, scales, zeros = _constants(node, weight, node.name)
    scale, zero_point = params.scale, params.zero_point
    # The layout of the weight is the same for any scale of the activation, so that one of run time needs no other.
    known = (scale, zero_point) if params.is_static else (1.0, 0)
    settings = (*known, *geometry, _packed_for(match["integers"]))
    packed = call(node, onednn.qconv_prepack.default, (values, scales, *settings), node)
    packed.meta["val"] = values.meta["val"]
    kernel_of = onednn.qconv_pointwise.default if params.is_static else onednn.qconv_pointwise.tensor
    args = (match["integers"], scale, zero_point, packed, scales, zeros, match.get("bias"), *geometry)
    kernel = call(node, kernel_of, (*args, *NO_OUTPUT_QPARAMS, *NO_UNARY), node)
    PAIR.put(kernel, _pair(params, weight))
    return kernel


def _measured_convolution(choose: Choice, match: Match, weight: IntegerWeight, geometry: Geometry) -> str | None:
    if choose is always_integer or rank(match["integers"]) != weight.values.dim():
        return None
    zeros, scale = torch.zeros(weight.values.shape[0], dtype=torch.int32), weight.scales
    packed = onednn.qconv_prepack(weight.values, scale, 0.02, 128, *geometry, _packed_for(match["integers"]))
    floats = weight.values.float()
    run = (aten.conv1d, aten.conv2d, aten.conv3d)[floats.dim() - 3]

    def integer(x: Tensor) -> Tensor:
        args = (x, 0.02, 128, packed, scale, zeros, None, *geometry, 1.0, 128, torch.uint8, *NO_UNARY)
        found: Tensor = onednn.qconv_pointwise(*args)
        return found

    return choose(match.root, match["integers"], integer, lambda x, w: run(x, w, None, *geometry), floats)


def activation_objection(params: QParams, weight: IntegerWeight | str, *, conv: bool) -> str | None:
    """Returns why a convolution (or a linear) cannot multiply an activation with a weight, or None."""
    if params.dtype not in (torch.uint8, torch.int8) or (conv and params.dtype != torch.uint8):
        return f"its activation is {params.dtype}, the kernel wants torch.uint8"
    return None if isinstance(weight, str) else ONEDNN_PAIRS.objection(_pair(params, weight))


def _pair(params: QParams, weight: IntegerWeight) -> int:
    return largest_pair(as_unsigned(params), weight.values)


def _geometry(match: Match, weight: IntegerWeight | str) -> Geometry | str:
    """Returns stride, padding, dilation and groups as the kernels take them, or why there is no kernel."""
    if isinstance(weight, str):
        return weight
    shape = tuple(weight.values.shape)
    found = geometry(match.root, shape[2:])
    reason = None if isinstance(found, str) else objection(_sizes(match["integers"]), shape, found)
    return reason or found


def _lower_linear(choose: Choice) -> Rewrite:
    def lower(match: Match) -> fx.Node | str:
        node, params = match.root, qparams(match["dequantize"])
        weight = integer_weight(match["weight"])
        reason = weight if isinstance(weight, str) else activation_objection(params, weight, conv=False)
        reason = reason or _linear_objection(match, weight)
        if reason:
            return reason
        assert isinstance(weight, IntegerWeight)
        reason = _measured_linear(choose, match, weight)
        if reason:
            return reason
        values, scales, zeros = _constants(node, weight, node.name)
        packed = call(node, onednn.qlinear_prepack.default, (values, _as_matrix(_packed_for(match["integers"]))), node)
        packed.meta["val"] = values.meta["val"].t()
        kernel_of = onednn.qlinear_pointwise.default if params.is_static else onednn.qlinear_pointwise.tensor
        args = (match["integers"], params.scale, params.zero_point, packed, scales, zeros, match.get("bias"))
        kernel = call(node, kernel_of, (*args, *NO_OUTPUT_QPARAMS, *NO_UNARY), node)
        PAIR.put(kernel, _pair(params, weight))
        return kernel

    return lower


def _measured_linear(choose: Choice, match: Match, weight: IntegerWeight) -> str | None:
    is_static = qparams(match["dequantize"]).is_static
    if choose is always_integer or (is_static and is_read_faster(match["integers"], weight)):
        return None
    zeros, scale = torch.zeros(weight.values.shape[0], dtype=torch.int32), weight.scales
    packed = onednn.qlinear_prepack(weight.values, _as_matrix(_packed_for(match["integers"])))
    floats = weight.values.float()

    def integer(x: Tensor) -> Tensor:
        args = (x, 0.02, 128, packed, scale, zeros, None, 1.0, 128, torch.uint8, *NO_UNARY)
        found: Tensor = onednn.qlinear_pointwise(*args)
        return found

    return choose(match.root, match["integers"], integer, aten.linear, floats)


def _linear_objection(match: Match, weight: IntegerWeight | str) -> str | None:
    bias = match.get("bias")
    if not isinstance(weight, str) and weight.values.dim() != 2:
        return "its weight is not a matrix"
    if bias is not None and (constant_value(bias) is None or rank(bias) != 1):
        return "its bias is not a constant vector"
    return None


def _weighted(*names: str) -> Op:
    return op(*names, input=ACTIVATION, weight=value("weight"), bias=optional(value("bias")))


def products(choose: Choice = always_integer) -> tuple[Rule, ...]:
    """Returns the rules of convolutions and linears.

    Args:
        choose: says for a layer that could run on integers why it should stay float, or None.
    """
    return (
        Rule(_weighted("conv1d", "conv2d", "conv3d"), _lower_convolution(choose)),
        Rule(_weighted("linear"), _lower_linear(choose)),
    )
