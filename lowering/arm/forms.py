"""A q/dq graph in the forms that ExecuTorch's passes for TOSA take.

Before: a graph that is spelled plainly. After: the same numbers. Biases are int32 in the scale of the sums, and clamps
in front of a rounding are clamps of integers.
"""

import torch
from torch import fx

from quantplug.core.patterns.language import op, single_use
from quantplug.core.patterns.rules import apply
from quantplug.lowering.clamps import clamp_rules
from quantplug.lowering.integer_biases import quantize_biases

_SOURCES = op("conv1d", "conv2d", "conv3d", "conv_transpose2d", "linear", "add", "sub", "mul")


def write_forms(graph: fx.Graph) -> None:
    """Rewrites a graph, in place."""
    apply(graph, clamp_rules(single_use(_SOURCES), (torch.int8, torch.int16)))
    quantize_biases(graph)
