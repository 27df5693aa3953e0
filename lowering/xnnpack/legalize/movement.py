"""Operators that move integers, in one scale from input to output.

Before: moves, pools, pads and concatenations whose qparams differ. After: the same numbers, rescaled beside them.
"""

from typing import Any

import torch
from torch import fx
from torchao.quantization.pt2e.quantizer import QuantizationConfig

from quantplug.core.graph.aliases import changed_under_other_names
from quantplug.core.graph.editing import add_constant
from quantplug.core.graph.facts import constant_value, operands, operator_name, tensor_value
from quantplug.core.graph.operators import ALIASES, COPIES, IDENTITIES, JOINS, MOVES, PADS, schema_names
from quantplug.core.graph.traits import per_dimension
from quantplug.core.patterns.language import Match
from quantplug.core.qdq.nodes import is_dequantize
from quantplug.core.qdq.qparams import StaticQParams, quantized_output, requantize, static_qparams
from quantplug.lowering.xnnpack.legalize.integers import one_dequantize_per_use
from quantplug.lowering.xnnpack.legalize.legalized import Legalized
from quantplug.lowering.xnnpack.legalize.operators import calls, first_input

# Kernels that move or mix integers of one scale: their output has the quantization parameters of their input.
_KERNELS = tuple(name for name in MOVES if name not in ("flip", "roll"))
_MOVES = schema_names((*_KERNELS, *IDENTITIES, *PADS, "expand", "max_pool2d", "upsample_bilinear2d"))
_PADS = schema_names(PADS)
# What ExecuTorch serializes as a reshape by numbers, or, as conv1d, as a conv2d between two of them.
_RESHAPES = {"aten::squeeze", "aten::squeeze_", "aten::unsqueeze", "aten::unsqueeze_", "aten::conv1d"}


def contiguous_constants(working: fx.GraphModule) -> None:
    """ExecuTorch's layout pass turns weights itself, and refuses those that are channels-last already."""
    for node in working.graph.find_nodes(op="get_attr"):
        value = constant_value(node)
        if value is not None and not value.is_contiguous():
            with working.graph.inserting_before(node):
                plain = add_constant(working, working.graph, value.detach().contiguous(), "contiguous")
            node.replace_all_uses_with(plain)
            working.graph.erase_node(node)


def find_resizing_by_other_factors(working: fx.GraphModule, found: Legalized) -> None:
    """Finds resizing by rounded factors: ExecuTorch hands it to XNNPACK, which takes the ratios of sizes."""
    for node in calls(working, ("aten::upsample_bilinear2d",)):
        reason = _rounded_factors(node)
        if reason is not None:
            found.portable[node.name] = reason


def resizes_by_ratios(match: Match, config: QuantizationConfig | None) -> str | None:
    """Holds for resizing by the ratios of its sizes, as XNNPACK takes every factor to be."""
    return _rounded_factors(match["op"])


def _rounded_factors(node: fx.Node) -> str | None:
    given = operands(node)
    factors, image = given["scale_factors"] or (), tensor_value(given["input"])
    sizes = () if image is None else tuple(image.shape[2:])
    rounds = any(isinstance(size, int) and size * factor % 1 for size, factor in zip(sizes, factors, strict=False))
    if given["align_corners"] or not rounds:
        return None
    return f"its factors {list(factors)} of {list(sizes)} are rounded, and XNNPACK's are ratios of sizes"


def find_reshapes_of_open_sizes(working: fx.GraphModule, found: Legalized) -> None:
    """Finds reshapes of two open sizes or more: ExecuTorch hands them to XNNPACK, and its serializer fails on them."""
    for node in calls(working, _RESHAPES):
        reason = _open_sizes(node)
        if reason is not None:
            found.portable[node.name] = reason


def one_open_size_if_1d(match: Match, config: QuantizationConfig | None) -> str | None:
    """Holds for convolutions over two dimensions, and for those over one of a result with at most one open size."""
    return _open_sizes(match["op"]) if operator_name(match["op"]) in _RESHAPES else None


def _open_sizes(node: fx.Node) -> str | None:
    result = tensor_value(node)
    number = 0 if result is None else sum(not isinstance(size, int) for size in result.shape)
    if number < 2:
        return None
    return f"{number} of its sizes are open, and XNNPACK reshapes with at most one; export the others static"


def spell_out_pooling(working: fx.GraphModule) -> None:
    """ExecuTorch 1.4's partitioner reads stride and kernel by position and as pairs: an omitted stride crashes it."""
    for node in calls(working, ("aten::max_pool2d", "aten::avg_pool2d")):
        values = operands(node)
        values["kernel_size"] = per_dimension(values["kernel_size"])
        values["stride"] = per_dimension(values["stride"]) or values["kernel_size"]
        values["padding"] = per_dimension(values["padding"])
        if "dilation" in values:
            values["dilation"] = per_dimension(values["dilation"])
        node.args, node.kwargs = tuple(values.values()), {}


def aliases_are_clones(working: fx.GraphModule) -> None:
    """A second name for a tensor has no kernel there, a copy has one; names are kept.

    Where an operator writes the tensor under one name and another reads it under the other, it stays: ExecuTorch
    makes the operator one that writes nothing, and knows who reads what.
    """
    tied = changed_under_other_names(working.graph)
    for node in calls(working, schema_names(ALIASES)):
        if node not in tied:
            node.target = torch.ops.aten.clone.default


def copies_of_integers_are_views(working: fx.GraphModule) -> None:
    """ExecuTorch 1.4 drops a copy and leaves the conversions around it; a view takes integers and costs nothing."""
    for node in calls(working, schema_names(COPIES)):
        source, value = first_input(node), tensor_value(node)
        if value is None or not is_dequantize(source) or static_qparams(source) != quantized_output(node):
            continue
        sizes = [size if isinstance(size, int) else -1 for size in value.shape]
        if sizes.count(-1) <= 1:
            node.target, node.args, node.kwargs = torch.ops.aten.reshape.default, (source, sizes), {}


def spell_out_slopes(working: fx.GraphModule) -> None:
    """The serializer reads the factor of elu by position; export leaves it out where it equals the default, an int."""
    for node in calls(working, ("aten::elu", "aten::elu_")):
        values = operands(node)
        node.args, node.kwargs = (values["self"], float(values["alpha"])), {}


def moves_keep_qparams(working: fx.GraphModule) -> None:
    """dq(a) - move - q(b) becomes dq(a) - move - q(a) - dq(a) - q(b): moving integers changes no number."""
    for node in calls(working, _MOVES):
        source, output = first_input(node), quantized_output(node)
        entered = static_qparams(source) if is_dequantize(source) else None
        if entered is None or output is None or entered == output or not entered.is_int8:
            continue
        if operator_name(node) in _PADS and not _pads_with_zero(node, entered):
            continue
        quantize = next(iter(node.users))
        with working.graph.inserting_before(quantize):
            quantize.replace_input_with(node, requantize(working.graph, node, entered))


def _pads_with_zero(node: fx.Node, entered: StaticQParams) -> bool:
    values = operands(node)
    constant_mode = values.get("mode", "constant") == "constant"
    return constant_mode and not values.get("value") and -128 <= entered.zero_point <= 127


def concatenations_share_qparams(working: fx.GraphModule) -> None:
    """Inputs of a quantized concatenation are converted to its output's parameters before it."""
    for node in calls(working, schema_names(JOINS)):
        output = quantized_output(node)
        values: Any = node.args[0]
        if output is None or not output.is_int8 or not all(is_dequantize(v) and static_qparams(v) for v in values):
            continue
        with working.graph.inserting_before(node):
            shared = [v if static_qparams(v) == output else requantize(working.graph, v, output) for v in values]
        node.args = (shared, *node.args[1:])


def pads_stay_quantized(working: fx.GraphModule) -> None:
    """A zero pad behind a dequantize is always serialized as integers, so it gets a quantized output."""
    for node in calls(working, _PADS):
        source = first_input(node)
        entered = static_qparams(source) if is_dequantize(source) else None
        if entered is None or quantized_output(node) is not None or not _pads_with_zero(node, entered):
            continue
        users = list(node.users)
        with working.graph.inserting_before(node.next):
            kept = requantize(working.graph, node, entered)
        for user in users:
            user.replace_input_with(node, kept)
    one_dequantize_per_use(working)
