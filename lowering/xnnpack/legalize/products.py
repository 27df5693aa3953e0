"""Convolutions and linear layers: weights and biases as XNNPACK's kernels take them, or float with the reason.

Before: products with quantized weights. After: each has an integer kernel, or float weights and a reason.
"""

from typing import Any

import torch
from torch import fx
from torchao.quantization.pt2e.quantizer import QuantizationConfig

from quantplug.core.graph.editing import add_constant, call_like, set_operand
from quantplug.core.graph.facts import constant_value, operands, operator_name, tensor_value
from quantplug.core.patterns.language import Match
from quantplug.core.qdq.nodes import is_dequantize, is_dynamic, is_quantize
from quantplug.core.qdq.qparams import folded, quantized_output, static_qparams
from quantplug.core.specs.limits import XNNPACK_RATIOS
from quantplug.lowering.xnnpack.legalize.legalized import Legalized
from quantplug.lowering.xnnpack.legalize.operators import (
    GEMMS,
    TRANSPOSED,
    after_activation,
    calls,
    first_input,
    replace_operand,
)

_ATEN = torch.ops.aten
_Q = torch.ops.quantized_decomposed
_TRANSPOSED = {1: _ATEN.conv_transpose1d.default, 2: _ATEN.conv_transpose2d.input, 3: _ATEN.conv_transpose3d.input}


def convolutions_by_dimension(working: fx.GraphModule) -> None:
    """Writes `aten.convolution`, which decompositions leave, as the operator of its dimension; names are kept."""
    for node in calls(working, ("aten::convolution",)):
        given = operands(node)
        common = (given["input"], given["weight"], given["bias"], given["stride"], given["padding"])
        dimensions = len(given["stride"])
        if given["transposed"]:
            node.target = _TRANSPOSED[dimensions]
            node.args = (*common, given["output_padding"], given["groups"], given["dilation"])
        else:
            node.target = getattr(_ATEN, f"conv{dimensions}d").default
            node.args = (*common, given["dilation"], given["groups"])
        node.kwargs = {}


def fold_constant_biases(working: fx.GraphModule) -> None:
    """XNNPACK's serializer quantizes biases itself, from float, with the very scale of a derived bias."""
    for node in calls(working, GEMMS | {"aten::conv3d"}):
        bias = operands(node).get("bias")
        value = folded(bias) if isinstance(bias, fx.Node) else None
        if value is not None:
            replace_operand(working, node, bias, value, "bias")


def separate_weight_only_biases(working: fx.GraphModule, found: Legalized) -> None:
    """XNNPACK multiplies float activations with int8 or int4 weights; the serializer cannot write their bias."""
    for node in calls(working, ("aten::linear",)):
        values = operands(node)
        weight, bias = values["weight"], values.get("bias")
        if not is_dequantize(weight) or is_dequantize(values["input"]) or folded(weight) is None:
            continue
        if static_qparams(weight) is not None:
            _per_channel(working, weight)
        if operands(weight).get("axis") != 0 or _has_zero_points(weight):
            continue
        found.weight_only.add(node.name)
        found.floats[node.name] = "its weights are integers, its input is not quantized"
        if bias is not None:
            node.args, node.kwargs = (values["input"], weight), {}
            users = list(node.users)
            with working.graph.inserting_before(node.next):
                biased = call_like(working.graph, node, _ATEN.add.Tensor, node, bias)
            for user in users:
                user.replace_input_with(node, biased)


def _has_zero_points(weight: fx.Node) -> bool:
    values = operands(weight)
    zero_points = values.get("zero_points", values.get("zero_point"))
    if isinstance(zero_points, fx.Node):
        stored = constant_value(zero_points)
        return stored is None or bool(stored.any())
    return bool(zero_points)


def fold_weights_without_integer_kernel(working: fx.GraphModule, found: Legalized) -> None:
    """Weights of a convolution or linear that no integer kernel computes become float constants."""
    for node in calls(working, GEMMS):
        weight = operands(node).get("weight")
        if not is_dequantize(weight) or node.name in found.weight_only:
            continue
        reason = _why_no_integer_gemm(working, node, weight)
        value = folded(weight) if reason else None
        if reason:
            found.floats[node.name] = reason
        if value is not None:
            replace_operand(working, node, weight, value, "weight")
            _drop_dynamic_quantization(node)


def _drop_dynamic_quantization(node: fx.Node) -> None:
    """A float kernel gains nothing from an input that is rounded to int8 just before it."""
    source = first_input(node)
    quantized = first_input(source) if is_dynamic(source) else None
    if is_quantize(quantized):
        node.replace_input_with(source, first_input(quantized))


def _why_no_integer_gemm(working: fx.GraphModule, node: fx.Node, weight: fx.Node) -> str | None:
    """Returns why XNNPACK has no integer kernel for a convolution or linear with quantized weights."""
    if folded(weight) is None:
        return "its weight is computed at run time"
    if _has_zero_points(weight):
        return "its weights have zero points other than 0"
    reason = _why_not_by_axis(node, weight) or _wide_output_padding(node)
    source = first_input(node)
    if reason is not None:
        return reason
    if is_dynamic(source):
        return _why_no_dynamic_gemm(working, node, weight)
    entered = static_qparams(source)
    if entered is None:
        return "its input is not quantized"
    output = quantized_output(after_activation(node))
    if not is_dequantize(source) or not entered.is_int8:
        return f"its input is {entered.dtype} and XNNPACK takes int8"
    if output is None or not output.is_int8:
        return "its output is not quantized to int8"
    reason = XNNPACK_RATIOS["gemm"].objection((entered.scale, _scales(weight)), output.scale)
    if reason is not None:
        return reason
    _widen_weight_range(weight)
    return None


def _scales(weight: fx.Node) -> Any:
    values = operands(weight)
    scales = values.get("scales", values.get("scale"))
    return constant_value(scales) if isinstance(scales, fx.Node) else scales


def _why_not_by_axis(node: fx.Node, weight: fx.Node) -> str | None:
    axis = operands(weight).get("axis")
    if axis is None:
        return None
    transposed = operator_name(node) in TRANSPOSED
    if axis != (1 if transposed else 0):
        return f"its weights are quantized along axis {axis}, XNNPACK reads them along the output channels"
    if transposed and operands(node).get("groups", 1) != 1:
        return "XNNPACK has no per-channel transposed convolution with groups"
    return None


def adds_less_than_a_step(match: Match, config: QuantizationConfig | None) -> str | None:
    """Holds for transposed convolutions that add less to their result than one step of their stride."""
    return _wide_output_padding(match["op"])


def _wide_output_padding(node: fx.Node) -> str | None:
    added, stride = (operands(node).get(name, ()) for name in ("output_padding", "stride"))
    wide = any(more >= step for more, step in zip(added, stride, strict=False))
    return f"its output padding {list(added)} is not less than its stride {list(stride)}" if wide else None


def find_wide_output_paddings(working: fx.GraphModule, found: Legalized) -> None:
    """Finds transposed convolutions that XNNPACK's float kernel does not take either."""
    for node in calls(working, TRANSPOSED):
        reason = _wide_output_padding(node)
        if reason is not None:
            found.portable[node.name] = reason


def narrow_weights_name_four_bits(working: fx.GraphModule) -> None:
    """Weights of linear layers within -8..7 name just that range, by which the serializer knows four bits."""
    for node in calls(working, ("aten::linear",)):
        weight = operands(node)["weight"]
        if isinstance(weight, fx.Node) and weight.target is torch.ops.torchao.dequantize_affine:
            _groups_name_four_bits(weight)
            continue
        values = operands(weight) if is_dequantize(weight) else {}
        kernel = tensor_value(weight) if values else None
        low, high = (values.get(name) for name in ("quant_min", "quant_max"))
        if kernel is None or not isinstance(low, int) or not isinstance(high, int) or not -8 <= low < high <= 7:
            continue
        is_read = kernel.numel() > 1 and not (is_dynamic(first_input(node)) and kernel.shape[-1] % 2)
        if is_read:  # others are wrong in four bits, or end the process
            set_operand(weight, "quant_min", -8)
            set_operand(weight, "quant_max", 7)


def _groups_name_four_bits(weight: fx.Node) -> None:
    """The same for weights in groups, as observers write them."""
    low, high = weight.args[5:7] if len(weight.args) > 6 else (None, None)
    if isinstance(low, int) and isinstance(high, int) and -8 <= low < high <= 7:
        weight.args = (*weight.args[:5], -8, 7, *weight.args[7:])


def _widen_weight_range(weight: fx.Node) -> None:
    """Only linear has int4 kernels: elsewhere a 4-bit range would select a packing that nothing computes."""
    values = operands(weight)
    if (values.get("quant_min"), values.get("quant_max")) == (-8, 7):
        weight.args = tuple(-128 if a == -8 else 127 if a == 7 else a for a in weight.args)


def _why_no_dynamic_gemm(working: fx.GraphModule, node: fx.Node, weight: fx.Node) -> str | None:
    name = operator_name(node)
    if name not in ("aten::linear", "aten::conv2d"):
        return "XNNPACK quantizes activations at run time for linear and 2-D convolutions only"
    values = operands(node)
    kernel = tensor_value(weight) if tensor_value(weight) is not None else folded(weight)
    if name == "aten::conv2d" and kernel is not None and values["groups"] > 1 and kernel.shape[1] == 1:
        return "XNNPACK has no depthwise convolution with activations quantized at run time"
    if name == "aten::conv2d":
        _widen_weight_range(weight)
    if static_qparams(weight) is not None:
        _per_channel(working, weight)
    return None


def _per_channel(working: fx.GraphModule, weight: fx.Node) -> None:
    """One scale for all becomes the same scale for each channel, the only form of the qd8 kernels."""
    params = static_qparams(weight)
    integers: Any = weight.args[0]
    stored = constant_value(integers)
    if params is None or stored is None:
        return
    channels = stored.shape[0]
    with working.graph.inserting_before(weight):
        scales = add_constant(working, working.graph, torch.full((channels,), params.scale), "scales")
        zeros = add_constant(working, working.graph, torch.zeros(channels, dtype=torch.int64), "zero_points")
    weight.target = _Q.dequantize_per_channel.default
    weight.args = (integers, scales, zeros, 0, params.quant_min, params.quant_max, params.dtype)


def own_constants_per_use(working: fx.GraphModule) -> None:
    """Each operator gets weights and biases of its own; the file stores equal bytes once.

    The serializer keeps one tensor for a constant. A bias that two inputs' scales quantize differently,
    or a weight that is read in two layouts, would be right for its first use only.
    """
    seen: set[str] = set()
    for node in calls(working, GEMMS):
        for operand in (operands(node).get("weight"), operands(node).get("bias")):
            user, held = (operand, operand.args[0]) if is_dequantize(operand) else (node, operand)
            value = constant_value(held) if isinstance(held, fx.Node) else None
            if value is None or not isinstance(held, fx.Node):
                continue
            if str(held.target) in seen:
                replace_operand(working, user, held, value, "constant")
            seen.add(str(held.target))
