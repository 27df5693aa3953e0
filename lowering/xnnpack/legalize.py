"""Makes a q/dq graph say only what XNNPACK's integer kernels can carry out.

Before: any q/dq graph. After: a graph that computes the same numbers, in which every operator is either
one that the serializer writes correctly or one that is marked to stay float, with the reason. ExecuTorch's
own partitioner takes many of these constructs and writes programs that do not load or are wrong.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.errors import LoweringError
from quantplug.core.graph import constant_value, describe, operands, rank, tensor_value
from quantplug.lowering.xnnpack.conversions import (
    INT8,
    QParams,
    add_constant,
    call,
    folded,
    is_dequantize,
    is_dynamic,
    is_quantize,
    like,
    operator_name,
    qparams,
    quantized_output,
    requantize,
    sole_user,
)
from quantplug.lowering.xnnpack.rewrites import AT_LOWERING

_ATEN = torch.ops.aten
_Q = torch.ops.quantized_decomposed

_CONVOLUTIONS = {"aten::conv1d", "aten::conv2d", "aten::conv_transpose1d", "aten::conv_transpose2d"}
_TRANSPOSED = {"aten::conv_transpose1d", "aten::conv_transpose2d"}
_GEMMS = _CONVOLUTIONS | {"aten::linear"}
# Kernels that move or mix integers of one scale: their output has the quantization parameters of their input.
_MOVES = {
    "aten::max_pool2d", "aten::permute", "aten::transpose", "aten::t", "aten::view", "aten::reshape",
    "aten::flatten", "aten::unflatten", "aten::unsqueeze", "aten::squeeze", "aten::slice", "aten::select",
    "aten::pad", "aten::constant_pad_nd", "aten::clone", "aten::contiguous", "aten::expand",
    "aten::pixel_shuffle", "aten::pixel_unshuffle", "aten::channel_shuffle", "aten::dropout", "aten::alias",
    "aten::detach", "aten::movedim", "aten::swapaxes", "aten::upsample_bilinear2d",
}  # fmt: skip
_PADS = {"aten::pad", "aten::constant_pad_nd"}
_FUSING = _GEMMS | {"aten::add", "aten::sub", "aten::mul"}
_ACTIVATIONS = {"aten::relu", "aten::relu_", "aten::relu6", "aten::hardtanh", "aten::hardtanh_"}
_CLAMPS = {"aten::clamp", "aten::clamp_", "aten::clamp_min", "aten::clamp_max"}

# Ratios of scales outside of which XNNPACK refuses to create the operator (its operator sources, "scale
# ratio must be in"): smallest and first too large.
_RATIOS = {
    "add": (2.0**-10, 2.0**8),
    "mul": (2.0**-16, 2.0**8),
    "convert": (2.0**-8, 2.0**7),
    "gemm": (0.0, 2.0**8),
}


@dataclass
class Legalized:
    """What legalization found out about the operators of a graph, by their names.

    Attributes:
        floats: operators that must run in float although their neighbours are quantized, and why.
        weight_only: linear operators with integer weights and float activations.
        portable: operators that must stay outside the delegates, and why.
    """

    floats: dict[str, str] = field(default_factory=dict)
    weight_only: set[str] = field(default_factory=set)
    portable: dict[str, str] = field(default_factory=dict)


def legalize(working: fx.GraphModule) -> Legalized:
    """Rewrites a q/dq graph in place for XNNPACK.

    Args:
        working: a private copy; nodes and buffers are added to it, operators keep their names.

    Returns:
        The operators that XNNPACK cannot take as they stand, with the reason.

    Raises:
        LoweringError: an operator has no kernel in XNNPACK and none in the runtime's portable library.
    """
    steps: tuple[Callable[[fx.GraphModule], None], ...] = (
        _operators_of_the_runtime,
        _signed_integers,
        _one_dequantize_per_use,
        _fold_constant_biases,
        _spell_out_pooling,
        _clamps_as_fusable_activations,
        _narrow_ranges_as_clamps,
        _quantize_scalars,
        _moves_keep_qparams,
        _concatenations_share_qparams,
        _pads_stay_quantized,
        _softmax_over_rows,
        _dynamic_linears_over_rows,
    )
    for step in steps:
        step(working)
    found = Legalized()
    _separate_weight_only_biases(working, found)
    _fold_weights_without_integer_kernel(working, found)
    _own_constants_per_use(working)
    _find_scale_ratios_out_of_range(working, found)
    working.graph.eliminate_dead_code()
    working.graph.lint()
    working.recompile()
    return found


def runs_alone(node: fx.Node) -> bool:
    """Tells whether an operator can be taken out of the integer domain by conversions around it alone."""
    return operator_name(node) not in _GEMMS and quantized_output(_after_activation(node)) is not None


def _calls(working: fx.GraphModule, names: Iterable[str]) -> list[fx.Node]:
    wanted = set(names)
    return [n for n in working.graph.nodes if operator_name(n) in wanted]


def _operators_of_the_runtime(working: fx.GraphModule) -> None:
    """Operators that the runtime does not have at all become those that it has, in float."""
    for node in _calls(working, ("aten::conv3d",)):
        for operand in (operands(node)["weight"], operands(node)["bias"]):
            value = folded(operand) if isinstance(operand, fx.Node) else None
            if value is not None:
                _replace_operand(working, node, operand, value, "volume")
    for rewrite in AT_LOWERING:
        rewrite(working)
    for node in _calls(working, ("aten::conv3d", "aten::conv_transpose3d")):
        raise LoweringError(
            f"{describe(node)} has no kernel in XNNPACK and none in ExecuTorch's portable library, "
            "which convolve over one or two dimensions; replace the layer or use another backend."
        )


def _signed_integers(working: fx.GraphModule) -> None:
    """Quint8 inside the graph becomes qint8 with a zero point 128 lower: the same reals, XNNPACK's dtype."""
    for node in list(working.graph.nodes):
        params = qparams(node)
        if params is None or not is_quantize(node) or params.dtype != torch.uint8:
            continue
        if not all(qparams(user) == params for user in node.users):
            continue  # the integers themselves leave the graph
        signed = (params.scale, params.zero_point - 128, params.quant_min - 128, params.quant_max - 128, torch.int8)
        for conversion in (node, *node.users):
            conversion.args = (conversion.args[0], *signed)


def _one_dequantize_per_use(working: fx.GraphModule) -> None:
    """A dequantize that integer and float operators share would be written for one of them only.

    Every operator that looks quantized gets its own; the others keep one between them, so that the
    conversion is carried out once.
    """
    for node in [n for n in working.graph.nodes if is_dequantize(n)]:
        users = sorted(node.users, key=lambda user: quantized_output(_after_activation(user)) is not None)
        shared = [user for user in users if quantized_output(_after_activation(user)) is None]
        for user in users[max(1, len(shared)) :]:
            with working.graph.inserting_before(node.next):
                own = like(working.graph.node_copy(node), node)
            user.replace_input_with(node, own)


def _fold_constant_biases(working: fx.GraphModule) -> None:
    """XNNPACK's serializer quantizes biases itself, from float, with the very scale of a derived bias."""
    for node in _calls(working, _GEMMS | {"aten::conv3d"}):
        bias = operands(node).get("bias")
        value = folded(bias) if isinstance(bias, fx.Node) else None
        if value is not None:
            _replace_operand(working, node, bias, value, "bias")


def _replace_operand(working: fx.GraphModule, user: fx.Node, old: Any, value: Tensor, name: str) -> None:
    with working.graph.inserting_before(user):
        user.replace_input_with(old, add_constant(working, working.graph, value.detach().clone(), name))


def _spell_out_pooling(working: fx.GraphModule) -> None:
    """The partitioner reads stride and kernel by position and as pairs: an omitted stride crashes it."""
    for node in _calls(working, ("aten::max_pool2d", "aten::avg_pool2d")):
        values = operands(node)
        values["kernel_size"] = _pair(values["kernel_size"])
        values["stride"] = _pair(values["stride"]) or values["kernel_size"]
        values["padding"] = _pair(values["padding"])
        if "dilation" in values:
            values["dilation"] = _pair(values["dilation"])
        node.args, node.kwargs = tuple(values.values()), {}


def _pair(value: Any) -> list[int]:
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values * 2 if len(values) == 1 else values


def _clamps_as_fusable_activations(working: fx.GraphModule) -> None:
    """XNNPACK fuses relu and hardtanh into the kernel before them, but the serializer drops a clamp."""
    for node in _calls(working, _CLAMPS):
        values = operands(node)
        low, high = values.get("min"), values.get("max")
        output = quantized_output(node)
        producer = values["self"]
        if output is None or operator_name(producer) not in _FUSING or len(producer.users) != 1:
            continue
        if isinstance(low, fx.Node) or isinstance(high, fx.Node):
            continue
        bounds = (_lowest(output) if low is None else low, _highest(output) if high is None else high)
        if bounds[0] <= bounds[1]:
            node.target, node.args, node.kwargs = _ATEN.hardtanh.default, (producer, *map(float, bounds)), {}


def _lowest(params: QParams) -> float:
    return (params.quant_min - params.zero_point) * params.scale


def _highest(params: QParams) -> float:
    return (params.quant_max - params.zero_point) * params.scale


def _narrow_ranges_as_clamps(working: fx.GraphModule) -> None:
    """XNNPACK's kernels saturate to the whole of int8; a narrower range becomes a clamp and the whole range."""
    for node in [n for n in working.graph.nodes if is_quantize(n)]:
        params = qparams(node)
        if params is not None and params.dtype == torch.int8 and not params.is_int8:
            _bound(working, node, params)
    for node in [n for n in working.graph.nodes if is_dequantize(n)]:
        params = qparams(node)
        if params is not None and params.dtype == torch.int8 and _first_input(node).op != "get_attr":
            node.args = (node.args[0], params.scale, params.zero_point, *INT8)  # reading needs no range


def _bound(working: fx.GraphModule, quantize: fx.Node, params: QParams) -> None:
    value, low, high = _first_input(quantize), _lowest(params), _highest(params)
    quantize.args = (value, params.scale, params.zero_point, *INT8)
    activation = operands(value) if operator_name(value) in _ACTIVATIONS and len(value.users) == 1 else None
    if activation is not None:
        low = max(low, float(activation.get("min_val", 0.0)))
        top = 6.0 if operator_name(value) == "aten::relu6" else activation.get("max_val", high)
        value.target, value.args, value.kwargs = _ATEN.hardtanh.default, (value.args[0], low, min(high, top)), {}
        return
    with working.graph.inserting_before(quantize):
        # Behind a kernel that takes no bounds the clamp works on the integers; rounding commutes with it.
        fused = operator_name(value) in _FUSING and len(value.users) == 1
        source = value if fused else requantize(working.graph, value, replace(params, quant_min=-128, quant_max=127))
        quantize.replace_input_with(value, call(working.graph, value, _ATEN.hardtanh.default, source, low, high))


def _quantize_scalars(working: fx.GraphModule) -> None:
    """A number beside a quantized operand becomes an int8 constant that stands for exactly that number."""
    kinds: dict[str, Any] = {
        "aten::add": _ATEN.add.Tensor, "aten::sub": _ATEN.sub.Tensor, "aten::mul": _ATEN.mul.Tensor,
    }  # fmt: skip
    for node in _calls(working, (*kinds, "aten::div")):
        values = operands(node)
        number, value = values.get("other"), values.get("self")
        if isinstance(number, fx.Node) or not isinstance(number, (int, float)) or isinstance(number, bool):
            continue
        if not is_dequantize(value) or quantized_output(_after_activation(node)) is None or values.get("alpha", 1) != 1:
            continue
        if operator_name(node) == "aten::div" and (values.get("rounding_mode") or not number):
            continue
        number = 1.0 / number if operator_name(node) == "aten::div" else float(number)
        with working.graph.inserting_before(node):
            constant = _int8_number(working, node, number)
        node.target = kinds.get(operator_name(node), _ATEN.mul.Tensor)
        node.args, node.kwargs = (value, constant), {}


def _int8_number(working: fx.GraphModule, model: fx.Node, number: float) -> fx.Node:
    # 127 steps of |number|/127 are the number itself, up to one rounding of the scale.
    scale = abs(number) / 127 or 1.0
    # Of the other operand's rank: ExecuTorch's layout pass turns 4-D operands back beside any other.
    shape = [1] * (rank(model) or 1)
    integer = torch.full(shape, 0 if number == 0 else 127 if number > 0 else -127, dtype=torch.int8)
    held = add_constant(working, working.graph, integer, "number")
    return call(working.graph, model, _Q.dequantize_per_tensor.default, held, scale, 0, *INT8)


def _after_activation(node: fx.Node) -> fx.Node:
    user = sole_user(node)
    return user if user is not None and operator_name(user) in _ACTIVATIONS else node


def _moves_keep_qparams(working: fx.GraphModule) -> None:
    """dq(a) - move - q(b) becomes dq(a) - move - q(a) - dq(a) - q(b): moving integers changes no number."""
    for node in _calls(working, _MOVES):
        source, output = _first_input(node), quantized_output(node)
        entered = qparams(source) if is_dequantize(source) else None
        if entered is None or output is None or entered == output or not entered.is_int8:
            continue
        if operator_name(node) in _PADS and not _pads_with_zero(node, entered):
            continue
        quantize = next(iter(node.users))
        with working.graph.inserting_before(quantize):
            quantize.replace_input_with(node, requantize(working.graph, node, entered))


def _first_input(node: fx.Node) -> Any:
    return node.args[0] if node.args else None


def _pads_with_zero(node: fx.Node, entered: QParams) -> bool:
    values = operands(node)
    constant_mode = values.get("mode", "constant") == "constant"
    return constant_mode and not values.get("value") and -128 <= entered.zero_point <= 127


def _concatenations_share_qparams(working: fx.GraphModule) -> None:
    """Inputs of a quantized concatenation are converted to its output's parameters before it."""
    for node in _calls(working, ("aten::cat", "aten::stack")):
        output = quantized_output(node)
        values: Any = node.args[0]
        if output is None or not output.is_int8 or not all(is_dequantize(v) and qparams(v) for v in values):
            continue
        with working.graph.inserting_before(node):
            shared = [v if qparams(v) == output else requantize(working.graph, v, output) for v in values]
        node.args = (shared, *node.args[1:])


def _pads_stay_quantized(working: fx.GraphModule) -> None:
    """A zero pad behind a dequantize is always serialized as integers, so it gets a quantized output."""
    for node in _calls(working, _PADS):
        source = _first_input(node)
        entered = qparams(source) if is_dequantize(source) else None
        if entered is None or quantized_output(node) is not None or not _pads_with_zero(node, entered):
            continue
        users = list(node.users)
        with working.graph.inserting_before(node.next):
            kept = requantize(working.graph, node, entered)
        for user in users:
            user.replace_input_with(node, kept)
    _one_dequantize_per_use(working)


def _softmax_over_rows(working: fx.GraphModule) -> None:
    """A softmax of images works on rows: ExecuTorch's layout pass would run it over channels behind a pooling.

    The pass keeps values channels-last until an operator asks otherwise, and softmax does not; a reshape does.
    """
    for node in _calls(working, ("aten::softmax", "aten::_softmax")):
        value, source = tensor_value(node), _first_input(node)
        shape: list[Any] = [] if value is None else list(value.shape)
        if len(shape) != 4 or operands(node)["dim"] not in (-1, 3) or not all(isinstance(s, int) for s in shape):
            continue
        users = list(node.users)
        with working.graph.inserting_before(node):
            rows = call(working.graph, node, _ATEN.reshape.default, source, [-1, shape[-1]])
        node.args = (rows, -1, *node.args[2:])
        with working.graph.inserting_before(node.next):
            image = call(working.graph, node, _ATEN.reshape.default, node, shape)
        for user in users:
            user.replace_input_with(node, image)


def _dynamic_linears_over_rows(working: fx.GraphModule) -> None:
    """A dynamic linear of images works on rows: ExecuTorch's layout pass would put a copy before the linear.

    Behind that copy the serializer no longer finds the dequantize, and refuses the program.
    """
    linears = dict.fromkeys(n for n in _calls(working, ("aten::linear",)) if _is_dynamic_image(n))
    quantizes: dict[Any, None] = dict.fromkeys(_first_input(_first_input(n)) for n in linears)
    for quantize in quantizes:
        readers = [user for dequantize in quantize.users for user in dequantize.users]
        if not all(reader in linears for reader in readers):
            continue
        source, chosen = quantize.args[0], quantize.args[1].args[0]
        with working.graph.inserting_before(chosen):
            rows = call(working.graph, quantize, _ATEN.flatten.using_ints, source, 0, -2)
        for node in (chosen, quantize):
            node.replace_input_with(source, rows)
        for reader in readers:
            _as_image(working, reader)


def _is_dynamic_image(linear: fx.Node) -> bool:
    value, source = tensor_value(linear), _first_input(linear)
    sizes = [] if value is None else list(value.shape)[1:]
    if not is_dynamic(source) or "affine" in operator_name(source):  # whose blocks have the image's rank
        return False
    return len(sizes) == 3 and all(isinstance(size, int) for size in sizes)


def _as_image(working: fx.GraphModule, linear: fx.Node) -> None:
    value, users = tensor_value(linear), list(linear.users)
    assert value is not None
    with working.graph.inserting_before(linear.next):
        image = call(working.graph, linear, _ATEN.reshape.default, linear, [-1, *value.shape[1:]])
    for user in users:
        user.replace_input_with(linear, image)


def _separate_weight_only_biases(working: fx.GraphModule, found: Legalized) -> None:
    """XNNPACK multiplies float activations with int8 or int4 weights; the serializer cannot write their bias."""
    for node in _calls(working, ("aten::linear",)):
        values = operands(node)
        weight, bias = values["weight"], values.get("bias")
        if not is_dequantize(weight) or is_dequantize(values["input"]) or folded(weight) is None:
            continue
        if qparams(weight) is not None:
            _per_channel(working, weight)
        if operands(weight).get("axis") != 0 or _has_zero_points(weight):
            continue
        found.weight_only.add(node.name)
        found.floats[node.name] = "its weights are integers, its input is not quantized"
        if bias is not None:
            node.args, node.kwargs = (values["input"], weight), {}
            users = list(node.users)
            with working.graph.inserting_before(node.next):
                biased = call(working.graph, node, _ATEN.add.Tensor, node, bias)
            for user in users:
                user.replace_input_with(node, biased)


def _has_zero_points(weight: fx.Node) -> bool:
    values = operands(weight)
    zero_points = values.get("zero_points", values.get("zero_point"))
    if isinstance(zero_points, fx.Node):
        stored = constant_value(zero_points)
        return stored is None or bool(stored.any())
    return bool(zero_points)


def _fold_weights_without_integer_kernel(working: fx.GraphModule, found: Legalized) -> None:
    """Weights of a convolution or linear that no integer kernel computes become float constants."""
    for node in _calls(working, _GEMMS):
        weight = operands(node).get("weight")
        if not is_dequantize(weight) or node.name in found.weight_only:
            continue
        reason = _why_no_integer_gemm(working, node, weight)
        value = folded(weight) if reason else None
        if reason:
            found.floats[node.name] = reason
        if value is not None:
            _replace_operand(working, node, weight, value, "weight")
            _drop_dynamic_quantization(node)


def _drop_dynamic_quantization(node: fx.Node) -> None:
    """A float kernel gains nothing from an input that is rounded to int8 just before it."""
    source = _first_input(node)
    quantized = _first_input(source) if is_dynamic(source) else None
    if is_quantize(quantized):
        node.replace_input_with(source, _first_input(quantized))


def _why_no_integer_gemm(working: fx.GraphModule, node: fx.Node, weight: fx.Node) -> str | None:
    """Returns why XNNPACK has no integer kernel for a convolution or linear with quantized weights."""
    if folded(weight) is None:
        return "its weight is computed at run time"
    if _has_zero_points(weight):
        return "its weights have zero points other than 0"
    reason = _why_not_by_axis(node, weight)
    source = _first_input(node)
    if reason is not None:
        return reason
    if is_dynamic(source):
        return _why_no_dynamic_gemm(working, node, weight)
    entered = qparams(source)
    if entered is None:
        return "its input is not quantized"
    output = quantized_output(_after_activation(node))
    if not is_dequantize(source) or not entered.is_int8:
        return f"its input is {entered.dtype} and XNNPACK takes int8"
    if output is None or not output.is_int8:
        return "its output is not quantized to int8"
    largest = _largest_scale(weight) * entered.scale / output.scale
    if largest >= _RATIOS["gemm"][1]:
        return f"the ratio {largest:.3g} of its scales is not below XNNPACK's {_RATIOS['gemm'][1]:.3g}"
    _widen_weight_range(weight)
    return None


def _largest_scale(weight: fx.Node) -> float:
    values = operands(weight)
    scales = values.get("scales", values.get("scale"))
    stored = constant_value(scales) if isinstance(scales, fx.Node) else torch.tensor(scales)
    return 0.0 if stored is None else float(stored.max())


def _why_not_by_axis(node: fx.Node, weight: fx.Node) -> str | None:
    axis = operands(weight).get("axis")
    if axis is None:
        return None
    transposed = operator_name(node) in _TRANSPOSED
    if axis != (1 if transposed else 0):
        return f"its weights are quantized along axis {axis}, XNNPACK reads them along the output channels"
    if transposed and operands(node).get("groups", 1) != 1:
        return "XNNPACK has no per-channel transposed convolution with groups"
    return None


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
    if qparams(weight) is not None:
        _per_channel(working, weight)
    return None


def _per_channel(working: fx.GraphModule, weight: fx.Node) -> None:
    """One scale for all becomes the same scale for each channel, the only form of the qd8 kernels."""
    params = qparams(weight)
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


def _own_constants_per_use(working: fx.GraphModule) -> None:
    """Each operator gets weights and biases of its own; the file stores equal bytes once.

    The serializer keeps one tensor for a constant. A bias that two inputs' scales quantize differently,
    or a weight that is read in two layouts, would be right for its first use only.
    """
    seen: set[str] = set()
    for node in _calls(working, _GEMMS):
        for operand in (operands(node).get("weight"), operands(node).get("bias")):
            user, held = (operand, operand.args[0]) if is_dequantize(operand) else (node, operand)
            value = constant_value(held) if isinstance(held, fx.Node) else None
            if value is None or not isinstance(held, fx.Node):
                continue
            if str(held.target) in seen:
                _replace_operand(working, user, held, value, "constant")
            seen.add(str(held.target))


def _find_scale_ratios_out_of_range(working: fx.GraphModule, found: Legalized) -> None:
    """Finds operators whose scales XNNPACK refuses; they run in float between conversions."""
    for node in working.graph.nodes:
        output = quantized_output(_after_activation(node))
        entered = [qparams(n) for n in node.all_input_nodes if is_dequantize(n)]
        scales = [p.scale for p in entered if p is not None]
        if output is None or not scales or is_dequantize(node) or is_quantize(node):
            continue
        ratio, kind = _ratio(node, scales, output.scale)
        low, high = _RATIOS.get(kind, (0.0, float("inf")))
        if not low <= ratio < high:
            reason = f"the ratio {ratio:.3g} of its scales is outside XNNPACK's [{low:.3g}, {high:.3g})"
            found.floats[node.name] = reason


def _ratio(node: fx.Node, scales: list[float], output: float) -> tuple[float, str]:
    name = operator_name(node)
    if name in ("aten::add", "aten::sub"):
        return max((s / output for s in scales), key=lambda r: max(r, 1 / r)), "add"
    if name == "aten::mul":
        return (scales[0] * scales[-1]) / output, "mul"
    if name in ("aten::leaky_relu", "aten::relu", "aten::hardtanh", "aten::relu6", "aten::clamp", "aten::mean"):
        return scales[0] / output, "convert"
    return 1.0, "none"
