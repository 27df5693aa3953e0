"""Submodels as operators of the graph around them.

Before: `cond`, whose branches are submodels, and scopes without gradients or with autocast disabled. After: their
operators, which ExecuTorch's partitioner does not look for in submodels. XNNPACK runs both branches, where portable
kernels would run one of them.
"""

from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.graph import attribute, tensor_value
from quantplug.lowering.xnnpack.conversions import add_constant, call
from quantplug.lowering.xnnpack.rewrites.writing import done, index_of

_ATEN = torch.ops.aten
_HIGHER = torch.ops.higher_order


def submodels_are_inlined(model: fx.GraphModule) -> fx.GraphModule:
    """Writes cond(p, f, g, x) as where(p, f(x), g(x)), and a scope as its operators; neither has effects."""
    while found := [node for node in model.graph.nodes if _is_inlined(node)]:
        for node in found:
            _replace(model, node)
    return done(model)


def _is_inlined(node: fx.Node) -> bool:
    """Tells whether all operators of the submodels may run; a branch that a size decides on stays a branch."""
    if node.target is _HIGHER.cond:
        return tensor_value(node.args[0]) is not None
    autocast = node.target is _HIGHER.wrap_with_autocast and not node.args[2]
    return node.target is _HIGHER.wrap_with_set_grad_enabled or autocast


def _replace(model: fx.GraphModule, node: fx.Node) -> None:
    with model.graph.inserting_before(node):
        results = _selected(model, node) if node.target is _HIGHER.cond else _of_scope(model, node)
    for user in list(node.users):
        user.replace_all_uses_with(results[index_of(user)])
        model.graph.erase_node(user)
    model.graph.erase_node(node)


def _selected(model: fx.GraphModule, node: fx.Node) -> list[Any]:
    predicate, taken, other, operands = node.args
    results = [_inlined(model, branch, operands) for branch in (taken, other)]
    return [call(model.graph, node, _ATEN.where.self, predicate, *pair) for pair in zip(*results, strict=True)]


def _of_scope(model: fx.GraphModule, node: fx.Node) -> list[Any]:
    settings = 1 if node.target is _HIGHER.wrap_with_set_grad_enabled else 4
    return _inlined(model, node.args[settings], node.args[settings + 1 :])


def _inlined(model: fx.GraphModule, held: Any, operands: Any) -> list[Any]:
    """Copies the operators of a submodel to the insertion point and returns its results."""
    submodel = attribute(model, str(held.target))
    known = dict(zip(submodel.graph.find_nodes(op="placeholder"), operands, strict=True))
    known |= {inner: _adopted(model, submodel, inner) for inner in submodel.graph.find_nodes(op="get_attr")}
    results: Any = model.graph.graph_copy(submodel.graph, known)
    return list(results)


def _adopted(model: fx.GraphModule, submodel: Any, inner: fx.Node) -> fx.Node:
    """Gives the graph a constant or a submodel that a submodel holds."""
    value = attribute(submodel, str(inner.target))
    if isinstance(value, Tensor):
        return add_constant(model, model.graph, value, "inlined")
    name = f"_quantplug_inlined_{sum(1 for _ in model.children())}"
    model.add_submodule(name, value)
    return model.graph.get_attr(name)
