"""A q/dq graph in the forms that ExecuTorch's passes for TOSA take.

Before: a graph that is spelled plainly. After: the same numbers. Biases are int32 in the scale of the sums, clamps in
front of a rounding are clamps of integers, a window over a whole map takes no step, and a clamp stands where
ExecuTorch's passes would hand on sums of more bits than the graph has.
"""

import math
from collections.abc import Iterator

import torch
from torch import fx

from quantplug.core.graph.editing import call, set_operand
from quantplug.core.graph.facts import operands, operator_name, sizes_of
from quantplug.core.graph.operators import COPIES, IDENTITIES, PERMUTATIONS, RESHAPES, schema_names
from quantplug.core.patterns.language import op, single_use
from quantplug.core.patterns.rules import apply
from quantplug.core.qdq.nodes import is_quantize
from quantplug.core.qdq.qparams import StaticQParams, static_qparams
from quantplug.lowering.clamps import clamp_rules
from quantplug.lowering.integer_biases import quantize_biases

_PRODUCTS = op("conv1d", "conv2d", "conv3d", "conv_transpose2d", "linear")
_OF_32_BITS = op("add", "sub", "mul", "maximum", "minimum", "sum", "abs")
_SOURCES = op("conv1d", "conv2d", "conv3d", "conv_transpose2d", "linear", "add", "sub", "mul")
_MOVES = schema_names((*RESHAPES, *COPIES, *PERMUTATIONS, *IDENTITIES))  # of all of a tensor


def write_forms(graph: fx.Graph) -> None:
    """Rewrites a graph, in place."""
    apply(graph, clamp_rules(single_use(_SOURCES), (torch.int8, torch.int16)))
    quantize_biases(graph)
    for node in list(graph.nodes):
        params = static_qparams(node) if is_quantize(node) else None
        if params is not None and (_is_handed_on(node, params) or _is_sum_handed_on(node, params)):
            _bound(node, params)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.avg_pool2d.default):
        _take_no_step(node)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.pad.default):
        _name_padding(node)


def _bound(node: fx.Node, params: StaticQParams) -> None:
    """Bounds integers by their range, which ExecuTorch's passes keep as an operator."""
    bounded = call(node.next, torch.ops.aten.clamp.default, (node, params.quant_min, params.quant_max), node)
    node.replace_all_uses_with(bounded, lambda user: user is not bounded)


def _is_handed_on(node: fx.Node, params: StaticQParams) -> bool:
    """Tells whether a product of 16 bits meets an operator of 32, behind moves too.

    Without an operator between them, ExecuTorch 1.4 (`rewrite_conv_pass.py`, `_has_int32_rescale_user`) hands the sums
    on as they are, in another scale.
    """
    is_wide = params.dtype == torch.int16 and node.all_input_nodes[0].target in _PRODUCTS.overloads
    return is_wide and any(reader.target in _OF_32_BITS.overloads for reader in _readers(node))


def _is_sum_handed_on(node: fx.Node, params: StaticQParams) -> bool:
    """Tells whether a sum of 32 bits meets an operator that takes it in the very scale that it has.

    ExecuTorch 1.4 (`fuse_consecutive_rescales_pass.py`) leaves out the rounding between them then.
    """
    source = node.all_input_nodes[0]
    if source.target not in _OF_32_BITS.overloads:
        return False
    own = _scale_of_result(source)
    readers = (reader for reader in _readers(node) if reader.target in _OF_32_BITS.overloads)
    return any(math.isclose(own, _scale_of_operand(reader, params.scale), rel_tol=1e-5) for reader in readers)


def _scale_of_operand(node: fx.Node, scale: float) -> float:
    """Returns the scale in which an operator of 32 bits computes with an operand that has a scale of its own."""
    found = [(each.scale, each.dtype) for each in map(static_qparams, node.all_input_nodes) if each is not None]
    scales, dtypes = [scale, *(each for each, _ in found)], {dtype for _, dtype in found}
    if operator_name(node) in ("aten::add", "aten::sub"):  # twice the largest, moved by what 32 bits leave free
        return 2.0 * max(scales) / (1 << (12 if torch.int16 in dtypes else 20))
    return min(scales) if operator_name(node) in ("aten::maximum", "aten::minimum") else scale


def _scale_of_result(node: fx.Node) -> float:
    """Returns the scale of what an operator of 32 bits yields."""
    scales = [each.scale for each in map(static_qparams, node.all_input_nodes) if each is not None]
    if operator_name(node) == "aten::mul":  # of one tensor by itself there is one operand
        return math.prod(scales) if len(scales) > 1 else math.prod(scales) ** 2
    return _scale_of_operand(node, scales[0]) if scales else math.inf


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the operators that read a quantized tensor, behind moves of the whole of it too."""
    waiting = [node]
    while waiting:
        for reader in (reader for dequantized in waiting.pop().users for reader in dequantized.users):
            yield reader
            if operator_name(reader) in _MOVES:
                waiting += filter(is_quantize, reader.users)


def _take_no_step(node: fx.Node) -> None:
    """Sets the stride of a window over a whole map to 1: by default it is the window, and Ethos-U55 knows up to 3."""
    given = operands(node)
    if list(given["kernel_size"]) == list(sizes_of(given["self"])[-2:]) and not any(given["padding"]):
        set_operand(node, "stride", [1, 1])


def _name_padding(node: fx.Node) -> None:
    """Calls padding by other numbers than 0 as the operators that ExecuTorch has kernels for; its passes keep `pad`."""
    given = operands(node)
    name = {"reflect": "reflection_pad", "replicate": "replication_pad"}.get(given["mode"])
    if name is not None:
        node.target = getattr(torch.ops.aten, f"{name}{len(given['pad']) // 2}d").default
        node.args, node.kwargs = (given["self"], given["pad"]), {}
    elif given["mode"] == "constant" and given["value"]:
        node.target = torch.ops.aten.constant_pad_nd.default
        node.args, node.kwargs = (given["self"], given["pad"], given["value"]), {}
