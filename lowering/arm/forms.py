"""A q/dq graph in the forms that ExecuTorch's passes for TOSA take.

Before: a graph that is spelled plainly. After: the same numbers. Biases are int32 in the scale of the sums, clamps in
front of a rounding are clamps of integers, a window over a whole map takes no step, and products of 16 bits end in a
clamp where an operator of 32 bits reads them.
"""

import torch
from torch import fx

from quantplug.core.graph.editing import call, set_operand
from quantplug.core.graph.facts import operands, sizes_of
from quantplug.core.patterns.language import op, single_use
from quantplug.core.patterns.rules import apply
from quantplug.core.qdq.nodes import is_quantize
from quantplug.core.qdq.qparams import is_static, qparams
from quantplug.lowering.clamps import clamp_rules
from quantplug.lowering.integer_biases import quantize_biases

_PRODUCTS = op("conv1d", "conv2d", "conv3d", "conv_transpose2d", "linear")
_OF_32_BITS = op("add", "sub", "mul", "maximum", "minimum", "sum", "abs")
_SOURCES = op("conv1d", "conv2d", "conv3d", "conv_transpose2d", "linear", "add", "sub", "mul")


def write_forms(graph: fx.Graph) -> None:
    """Rewrites a graph, in place."""
    apply(graph, clamp_rules(single_use(_SOURCES), (torch.int8, torch.int16)))
    quantize_biases(graph)
    for node in list(graph.nodes):
        if is_quantize(node) and is_static(node) is None and qparams(node).dtype == torch.int16:
            _end_in_16_bits(node)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.avg_pool2d.default):
        _take_no_step(node)


def _end_in_16_bits(node: fx.Node) -> None:
    """Bounds the integers of a product by their range, which ExecuTorch's passes keep as an operator.

    Without one between them, ExecuTorch 1.4 (`rewrite_conv_pass.py`, `_has_int32_rescale_user`) hands the sums of a
    product of 16 bits to a sum or an elementwise product as they are, in another scale.
    """
    source = node.args[0]
    readers = [reader for dequantized in node.users for reader in dequantized.users]
    if not isinstance(source, fx.Node) or source.target not in _PRODUCTS.overloads:
        return
    if any(reader.target in _OF_32_BITS.overloads for reader in readers):
        params = qparams(node)
        bounded = call(node.next, torch.ops.aten.clamp.default, (node, params.quant_min, params.quant_max), node)
        node.replace_all_uses_with(bounded, lambda user: user is not bounded)


def _take_no_step(node: fx.Node) -> None:
    """Sets the stride of a window over a whole map to 1: by default it is the window, and Ethos-U55 knows up to 3."""
    given = operands(node)
    if list(given["kernel_size"]) == list(sizes_of(given["self"])[-2:]) and not any(given["padding"]):
        set_operand(node, "stride", [1, 1])
