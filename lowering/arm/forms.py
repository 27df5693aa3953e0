"""A q/dq graph in the forms that ExecuTorch's passes for TOSA take.

Before: a graph that is spelled plainly. After: the same numbers. Biases are int32 in the scale of the sums, clamps in
front of a rounding are clamps of integers, and a window over a whole map takes no step.
"""

import torch
from torch import fx

from quantplug.core.graph.editing import set_operand
from quantplug.core.graph.facts import operands, sizes_of
from quantplug.core.patterns.language import op, single_use
from quantplug.core.patterns.rules import apply
from quantplug.lowering.clamps import clamp_rules
from quantplug.lowering.integer_biases import quantize_biases

_SOURCES = op("conv1d", "conv2d", "conv3d", "conv_transpose2d", "linear", "add", "sub", "mul")


def write_forms(graph: fx.Graph) -> None:
    """Rewrites a graph, in place."""
    apply(graph, clamp_rules(single_use(_SOURCES), (torch.int8, torch.int16)))
    quantize_biases(graph)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.avg_pool2d.default):
        _take_no_step(node)


def _take_no_step(node: fx.Node) -> None:
    """Sets the stride of a window over a whole map to 1: by default it is the window, and Ethos-U55 knows up to 3."""
    given = operands(node)
    if list(given["kernel_size"]) == list(sizes_of(given["self"])[-2:]) and not any(given["padding"]):
        set_operand(node, "stride", [1, 1])
