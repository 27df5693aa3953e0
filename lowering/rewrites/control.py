"""Submodels as operators of the graph around them.

Before: `cond`, whose branches are submodels, and scopes. After: their operators, which ExecuTorch's partitioner does
not look for in submodels. XNNPACK runs both branches, where portable kernels would run one of them.
"""

import torch
from torch import fx

from quantplug.core.graph.editing import call_like
from quantplug.core.graph.facts import tensor_value
from quantplug.lowering.rewrites.writing import done
from quantplug.lowering.scopes import inline_scopes, inlined, replace_results

_ATEN = torch.ops.aten
_HIGHER = torch.ops.higher_order


def submodels_are_inlined(model: fx.GraphModule) -> fx.GraphModule:
    """Writes cond(p, f, g, x) as where(p, f(x), g(x)), and a scope as its operators; neither has effects."""
    inline_scopes(model)
    while found := [node for node in model.graph.nodes if _is_inlined(node)]:
        for node in found:
            _select(model, node)
        inline_scopes(model)
    return done(model)


def _is_inlined(node: fx.Node) -> bool:
    """Tells whether all operators of the submodels may run; a branch that a size decides on stays a branch."""
    return node.target is _HIGHER.cond and tensor_value(node.args[0]) is not None


def _select(model: fx.GraphModule, node: fx.Node) -> None:
    predicate, taken, other, operands = node.args
    with model.graph.inserting_before(node):
        results = [inlined(model, branch, operands) for branch in (taken, other)]
        pairs = zip(*results, strict=True)
        chosen = [call_like(model.graph, node, _ATEN.where.self, predicate, *pair) for pair in pairs]
    replace_results(node, chosen)
