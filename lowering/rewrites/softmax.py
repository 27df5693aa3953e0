"""Softmax as operators that integer kernels have each: maxima, differences, a table of exp, sums and reciprocals.

Before: a graph with softmax. After: exp(x - max) times the reciprocal of its sum, which is finite for every row.
"""

import torch
from torch import fx

from quantplug.core.graph.facts import tensor_value
from quantplug.lowering.rewrites.writing import Writer, done, matching

_ATEN = torch.ops.aten


def softmax_is_steps(model: fx.GraphModule) -> fx.GraphModule:
    """Writes softmax of float32 over one dimension as its steps."""
    for node, values in matching(model, "softmax", "_softmax"):
        source = tensor_value(values["self"])
        if source is None or source.dtype != torch.float32 or values.get("dtype") or not source.dim():
            continue
        write, along = Writer(model, node), ([values["dim"]], True)
        peaks = write.call(_ATEN.amax.default, values["self"], *along)
        powers = write.call(_ATEN.exp.default, write.call(_ATEN.sub.Tensor, values["self"], peaks))
        sums = write.call(_ATEN.sum.dim_IntList, powers, *along)
        write.replace(write.call(_ATEN.mul.Tensor, powers, write.call(_ATEN.reciprocal.default, sums)))
    return done(model)
