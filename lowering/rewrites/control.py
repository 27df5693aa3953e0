"""Submodels as operators of the graph around them.

Before: `cond`, whose branches are submodels, and scopes. After: their operators, which ExecuTorch's partitioner does
not look for in submodels, nor ONNX Runtime and OpenVINO for integer kernels. Both branches run, where portable kernels
and those of floats would run one of them.
"""

import torch
from torch import fx

from quantplug.core.graph.editing import call_like
from quantplug.core.graph.facts import attribute, tensor_value
from quantplug.core.qdq.nodes import CAST_OP, is_qdq
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


def quantized_branches_are_inlined(model: fx.GraphModule) -> fx.GraphModule:
    """Writes those cond(p, f, g, x) as where(p, f(x), g(x)) that hold integers or weights in halves."""
    while found := [node for node in model.graph.nodes if _is_inlined(node) and _is_quantized(model, node)]:
        for node in found:
            _select(model, node)
    return done(model)


def _is_quantized(model: fx.GraphModule, node: fx.Node) -> bool:
    """Tells whether a branch of a condition, or of one in it, reads or yields what is quantized."""
    read = (attribute(model, str(each.target)) for each in node.all_input_nodes if each.op == "get_attr")
    branches = (each for each in read if isinstance(each, fx.GraphModule))
    within = (inner for branch in branches for inner in branch.modules() if isinstance(inner, fx.GraphModule))
    return any(is_qdq(each) or each.target is CAST_OP for inner in within for each in inner.graph.nodes)


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
