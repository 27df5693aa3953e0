"""Quantize and dequantize nodes of a q/dq graph, read and written at one place.

Before: ATen nodes. After: their quantization parameters as values, and new nodes with the metadata of
the node they stand for.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from quantplug.core.graph.editing import like

_Q = torch.ops.quantized_decomposed


def call(graph: fx.Graph, model: fx.Node, target: Callable[..., Any], *args: Any) -> fx.Node:
    """Creates an operator call at the graph's insertion point, with the metadata of another node."""
    return like(graph.call_function(target, args), model)
