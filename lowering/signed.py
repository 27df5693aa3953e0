"""Unsigned integers of a q/dq graph as signed ones, for engines that have kernels for these alone."""

import torch
from torch import fx

from quantplug.core.qdq.nodes import is_quantize
from quantplug.core.qdq.qparams import static_qparams


def signed_integers(graph: fx.Graph) -> None:
    """Makes uint8 inside of a graph int8 with a zero point that is 128 lower, which stands for the same numbers."""
    for node in list(graph.nodes):
        params = static_qparams(node)
        if params is None or not is_quantize(node) or params.dtype != torch.uint8:
            continue
        if not all(static_qparams(user) == params for user in node.users):
            continue  # the integers themselves leave the graph
        signed = (params.scale, params.zero_point - 128, params.quant_min - 128, params.quant_max - 128, torch.int8)
        for conversion in (node, *node.users):
            conversion.args = (conversion.args[0], *signed)
