"""Expansions as what kernels do anyway, broadcast, so that none of them cuts a delegate.

Before: a float graph with tensors that are expanded. After: their readers broadcast the small ones; where a reader
does not, a product with ones does.
"""

from collections.abc import Callable

import torch
from torch import Tensor, fx

from quantplug.core.graph.facts import operator_name, tensor_value
from quantplug.core.graph.operators import schema_names
from quantplug.core.qdq.nodes import is_dequantize, is_quantize
from quantplug.lowering.rewrites.writing import Writer, alike, done, matching

_ATEN = torch.ops.aten
_BROADCASTING = schema_names(("add", "sub", "mul", "div", "maximum", "minimum"))


def expansions_are_broadcast(model: fx.GraphModule, taken: Callable[[fx.Node], bool] | None = None) -> fx.GraphModule:
    """Lets readers of expanded float32 tensors broadcast them, or multiplies them by ones.

    Args:
        model: a graph module; it is changed in place and returned.
        taken: which nodes may be written so, None for all.
    """
    for node, values in matching(model, "expand", "expand_as"):
        source, result = tensor_value(values["self"]), tensor_value(node)
        if source is None or result is None or source.dtype != torch.float32:
            continue
        if is_dequantize(values["self"]) and all(map(is_quantize, node.users)):
            continue  # of integers
        if taken is not None and not taken(node):
            continue
        write = Writer(model, node)
        new = [1] * (result.dim() - source.dim())
        small = write.reshape(values["self"], *new, *source.shape) if new else values["self"]
        if all(_broadcasts(user, node, result) for user in node.users):
            node.replace_all_uses_with(small)
            continue
        sizes = [
            1 if alike([have], [size]) else size for have, size in zip([*new, *source.shape], result.shape, strict=True)
        ]
        if all(isinstance(size, int) for size in sizes):
            ones = write.constant(torch.ones(sizes), "ones")
            write.replace(write.call(_ATEN.mul.Tensor, small, ones))
    return done(model)


def _broadcasts(user: fx.Node, expanded: fx.Node, result: Tensor) -> bool:
    """Tells whether an operator has another tensor beside the expanded one that is as large as its result."""
    others = [tensor_value(node) for node in user.all_input_nodes if node is not expanded]
    found = tensor_value(user)
    if operator_name(user) not in _BROADCASTING or found is None or len(others) != 1 or others[0] is None:
        return False
    return found.dim() == result.dim() and alike(others[0].shape, found.shape)
