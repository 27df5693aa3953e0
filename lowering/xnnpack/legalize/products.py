"""Convolutions and linear layers: weights and biases as XNNPACK's kernels take them, or float with the reason.

Before: products with quantized weights. After: each has an integer kernel, or float weights and a reason.
"""

from typing import Any

import torch
from torch import Tensor, fx
from torchao.quantization.pt2e.quantizer import QuantizationConfig

from quantplug.core.graph.editing import call_like, constant, like, set_operand
from quantplug.core.graph.facts import constant_value, operands, operator_name, tensor_value
from quantplug.core.observers.rowwise import granularity_of
from quantplug.core.patterns.language import Match
from quantplug.core.qdq.calls import QuantizedCall, quantized_calls
from quantplug.core.qdq.nodes import is_dequantize, is_quantize
from quantplug.core.qdq.qparams import StaticQParams, folded, requantize, static_qparams
from quantplug.core.specs.limits import XNNPACK_RATIOS
from quantplug.lowering.xnnpack.legalize.refusals import TRANSPOSED, Refusal, too_many_open_sizes, wide_output_padding

_ATEN = torch.ops.aten
_Q = torch.ops.quantized_decomposed
_FLOAT_OUTPUT = "its output is not quantized to int8"
GEMMS = ("aten::conv1d", "aten::conv2d", *TRANSPOSED, "aten::linear")
_OVER_TWO = {"aten::conv1d": _ATEN.conv2d.default, "aten::conv_transpose1d": _ATEN.conv_transpose2d.input}


def own_constant(user: fx.Node, old: Any, value: Tensor, name: str) -> None:
    """Gives one operand of an operator a constant of its own."""
    user.replace_input_with(old, constant(user, name, value.detach().clone()))


def constant_biases_are_float(working: fx.GraphModule) -> None:
    """XNNPACK's serializer quantizes biases itself, from float, with the very scale of a derived bias."""
    for call in quantized_calls(working.graph, (*GEMMS, "aten::conv3d")):
        value = folded(call.bias) if isinstance(call.bias, fx.Node) else None
        if value is not None:
            own_constant(call.node, call.bias, value, "bias")


def _weight_only(call: QuantizedCall) -> str | None:
    """XNNPACK multiplies float activations with int8 or int4 weights that have no zero points."""
    if not is_dequantize(call.weight) or is_dequantize(call.input) or not call.is_known:
        return None
    by_row = operands(call.weight).get("axis") == 0 or (static_qparams(call.weight) and call.stored is not None)
    return "its weights are integers, its input is not quantized" if by_row and not _has_zero_points(call) else None


def _bias_apart(working: fx.GraphModule, call: QuantizedCall) -> None:
    """The serializer cannot write the bias of a float linear layer with integer weights."""
    node, users = call.node, list(call.node.users)
    _per_channel(call)
    if call.bias is not None:
        node.args, node.kwargs = (call.input, call.weight), {}
        with working.graph.inserting_before(node.next):
            biased = call_like(working.graph, node, _ATEN.add.Tensor, node, call.bias)
        for user in users:
            user.replace_input_with(node, biased)


def _has_zero_points(call: QuantizedCall) -> bool:
    values = operands(call.weight)
    zero_points = values.get("zero_points", values.get("zero_point"))
    if isinstance(zero_points, fx.Node):
        stored = constant_value(zero_points)
        return stored is None or bool(stored.any())
    return bool(zero_points)


def _why_no_integer_gemm(call: QuantizedCall) -> str | None:
    """Returns why XNNPACK has no integer kernel for a convolution or linear with quantized weights."""
    if not is_dequantize(call.weight) or (operator_name(call.node) == "aten::linear" and _weight_only(call)):
        return None
    if not call.is_known:
        return "its weight is computed at run time"
    if _has_zero_points(call):
        return "its weights have zero points other than 0"
    reason = _why_not_by_axis(call) or wide_output_padding(call)
    return reason or (_why_no_dynamic_gemm(call) if call.is_dynamic else _why_no_static_gemm(call))


def _why_no_static_gemm(call: QuantizedCall) -> str | None:
    entered, output = static_qparams(call.input), call.output
    if entered is None:
        return "its input is not quantized"
    if not is_dequantize(call.input) or not entered.is_int8:
        return f"its input is {entered.dtype} and XNNPACK takes int8"
    if output is None or not output.is_int8:
        return _FLOAT_OUTPUT
    return XNNPACK_RATIOS["gemm"].objection((entered.scale, _scales(call.weight)), output.scale)


def yields_integers_if_static(match: Match, config: QuantizationConfig) -> str | None:
    """Holds unless a config gives what a layer reads a scale that calibration fixes, and leaves its result float."""
    read = config.input_activation
    is_static = read is not None and not read.is_dynamic and granularity_of(read) is None
    return _FLOAT_OUTPUT if is_static and config.output_activation is None else None


def takes_run_time_scales(match: Match, config: QuantizationConfig) -> str | None:
    """Holds unless a convolution reads activations with scales of run time, for which there is no kernel.

    Images are of more than one number, as torchao takes a range for each number for one range of all.
    """
    read, image = config.input_activation, tensor_value(match["x"])
    if read is None or not read.is_dynamic:
        return None
    if image is not None and all(isinstance(size, int) and size == 1 for size in image.shape[1:]):
        return "each of its images is a single number, which has no range"
    return _why_no_dynamic_gemm(QuantizedCall.of(match["op"]))


def _why_no_dynamic_gemm(call: QuantizedCall) -> str | None:
    name, weight = operator_name(call.node), tensor_value(call.weight)
    if name == "aten::linear":
        return None
    kernel = call.kernel if weight is None else weight
    if name in TRANSPOSED or (kernel is not None and kernel.dim() != 4):
        return "XNNPACK quantizes activations at run time for linear and 2-D convolutions only"
    if kernel is not None and one_channel_each(kernel):
        return "XNNPACK has no convolution of single input channels with activations quantized at run time"
    return None


def one_channel_each(kernel: Tensor) -> bool:
    """Tells whether each output of a convolution reads one input channel, which ExecuTorch takes for depthwise."""
    return kernel.shape[1] == 1


def _scales(weight: fx.Node) -> Any:
    values = operands(weight)
    scales = values.get("scales", values.get("scale"))
    return constant_value(scales) if isinstance(scales, fx.Node) else scales


def _why_not_by_axis(call: QuantizedCall) -> str | None:
    axis = operands(call.weight).get("axis")
    if axis is None:
        return None
    transposed = operator_name(call.node) in TRANSPOSED
    if axis != (1 if transposed else 0):
        return f"its weights are quantized along axis {axis}, XNNPACK reads them along the output channels"
    if transposed and call.operands.get("groups", 1) != 1:
        return "XNNPACK has no per-channel transposed convolution with groups"
    return None


def _computed_in_float(working: fx.GraphModule, call: QuantizedCall) -> None:
    """Weights that no integer kernel computes become float constants, where they are known.

    A float kernel gains nothing from an input that is rounded to int8 just before it.
    """
    if call.kernel is not None:
        own_constant(call.node, call.weight, call.kernel, "weight")
        quantized = call.input.args[0] if call.is_dynamic else None
        if is_quantize(quantized):
            call.node.replace_input_with(call.input, quantized.args[0])  # type: ignore[arg-type]


def _as_kernels_read(working: fx.GraphModule, call: QuantizedCall) -> None:
    """Integer weights get the one form that the kernel has: a scale for each channel, or all of int8."""
    if not is_dequantize(call.weight) or not is_dequantize(call.input):
        return
    if not call.is_dynamic or operator_name(call.node) == "aten::conv2d":
        _widen_weight_range(call.weight)
    if call.is_dynamic:
        _per_channel(call)


def float_rows_between_integers_are_images(working: fx.GraphModule) -> None:
    """A float convolution of one dimension beside conversions is spelled over two, reshaped as what is there.

    ExecuTorch 1.4's `Conv1dUnsqueezePass` takes the kernel between such conversions for one of integers, and the
    serializer then refuses the program.
    """
    for call in quantized_calls(working.graph, _OVER_TWO):
        written = {static_qparams(user) if is_quantize(user) else None for user in call.node.users}
        yielded = next(iter(written)) if len(written) == 1 else None
        is_beside = is_dequantize(call.input) or any(map(is_quantize, call.node.users))
        is_float = call.kernel is not None and not is_dequantize(call.weight)
        if is_beside and is_float and not too_many_open_sizes(call):
            _spell_over_two(working, call, static_qparams(call.input), yielded)


def _spell_over_two(
    working: fx.GraphModule, call: QuantizedCall, entered: StaticQParams | None, yielded: StaticQParams | None
) -> None:
    node, graph, users, given = call.node, working.graph, list(call.node.users), call.operands
    assert call.kernel is not None  # told by the caller
    own_constant(node, call.weight, call.kernel.unsqueeze(-1), "weight")
    with graph.inserting_before(node):
        image = call_like(graph, node, _ATEN.unsqueeze.default, call.input, -1)
        image = requantize(graph, image, entered) if entered else image
    node.replace_input_with(call.input, image)
    node.target = _OVER_TWO[operator_name(node)]
    for name, one in (("stride", 1), ("padding", 0), ("output_padding", 0), ("dilation", 1)):
        if name in given:
            set_operand(node, name, [*given[name], one])
    with graph.inserting_before(node.next):
        image = requantize(graph, node, yielded) if yielded else node
        rows = call_like(graph, node, _ATEN.flatten.using_ints, image, -2)
    for user in users:
        user.replace_input_with(node, rows)


WEIGHT_ONLY = Refusal(("aten::linear",), _weight_only, instead=_bias_apart)
NO_INTEGER_KERNEL = Refusal(GEMMS, _why_no_integer_gemm, instead=_computed_in_float, otherwise=_as_kernels_read)


def narrow_weights_name_four_bits(working: fx.GraphModule) -> None:
    """Weights of linear layers within -8..7 name just that range, by which the serializer knows four bits."""
    for call in quantized_calls(working.graph, ("aten::linear",)):
        weight = call.weight
        if isinstance(weight, fx.Node) and weight.target is torch.ops.torchao.dequantize_affine:
            _groups_name_four_bits(weight)
            continue
        values = operands(weight) if is_dequantize(weight) else {}
        kernel = tensor_value(weight) if values else None
        low, high = (values.get(name) for name in ("quant_min", "quant_max"))
        if kernel is None or not isinstance(low, int) or not isinstance(high, int) or not -8 <= low < high <= 7:
            continue
        is_read = kernel.numel() > 1 and not (call.is_dynamic and kernel.shape[-1] % 2)
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


def _per_channel(call: QuantizedCall) -> None:
    """One scale for all becomes the same scale for each channel, the only form of the qd8 kernels."""
    weight, stored, params = call.weight, call.stored, static_qparams(call.weight)
    if params is None or stored is None:
        return
    channels = stored.shape[0]
    scales = constant(weight, "scales", torch.full((channels,), params.scale))
    zeros = constant(weight, "zero_points", torch.zeros(channels, dtype=torch.int64))
    weight.target = _Q.dequantize_per_channel.default
    weight.args = (weight.args[0], scales, zeros, 0, params.quant_min, params.quant_max, params.dtype)


def _own_dequantize(working: fx.GraphModule, user: fx.Node, shared: fx.Node) -> fx.Node:
    if len(shared.users) == 1:
        return shared
    with working.graph.inserting_before(user):
        own = like(working.graph.node_copy(shared), shared)
    user.replace_input_with(shared, own)
    return own


def own_constants_per_use(working: fx.GraphModule) -> None:
    """Each operator gets weights and biases of its own; the file stores equal bytes once.

    The serializer keeps one tensor for a constant. A bias that two inputs' scales quantize differently,
    or a weight that is read in two layouts, would be right for its first use only. A dequantize node that the steps
    of a recurrence share would tie their delegates to each other both ways.
    """
    seen: set[str] = set()
    for call in quantized_calls(working.graph, GEMMS):
        for operand in (call.weight, call.bias):
            user, held = call.node, operand
            if is_dequantize(operand):
                user = _own_dequantize(working, call.node, operand)
                held = user.args[0]
            value = constant_value(held) if isinstance(held, fx.Node) else None
            if value is None or not isinstance(held, fx.Node):
                continue
            if str(held.target) in seen:
                own_constant(user, held, value, "constant")
            seen.add(str(held.target))
