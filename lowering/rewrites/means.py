"""Global means as average poolings over the whole map, which is the form that CMSIS-NN has a kernel for."""

import torch
from torch import fx

from quantplug.core.graph.editing import call
from quantplug.core.graph.facts import operands, sizes_of, tensor_value
from quantplug.core.patterns.language import Match, op, value
from quantplug.core.patterns.rules import Rule, apply

_ATEN = torch.ops.aten


def means_are_poolings(model: fx.GraphModule) -> fx.GraphModule:
    """Replaces means over both spatial dimensions, and adaptive pooling to one pixel, in place."""
    names = ("mean.dim", "adaptive_avg_pool2d")
    apply(model.graph, [Rule(op(name, self=value("x"), name="op"), _pool) for name in names])
    model.recompile()
    return model


def _pool(match: Match) -> fx.Node | str:
    node, source = match["op"], match["x"]
    shape = tensor_value(source)
    if shape is None or shape.dim() != 4 or not _is_global(node):
        return "no mean over the whole map"
    height, width = sizes_of(source)[2:]
    if not (isinstance(height, int) and isinstance(width, int)):
        return "the size of the map is open"
    pooled = call(node, _ATEN.avg_pool2d.default, (source, [height, width]), node)
    pooled.meta["val"] = shape.mean((2, 3), keepdim=True)
    return pooled if operands(node).get("keepdim", True) else call(node, _ATEN.flatten.using_ints, (pooled, 1), node)


def _is_global(node: fx.Node) -> bool:
    given = operands(node)
    if "output_size" in given:
        return list(given["output_size"]) == [1, 1]
    return sorted(dim % 4 for dim in given["dim"] or ()) == [2, 3]
