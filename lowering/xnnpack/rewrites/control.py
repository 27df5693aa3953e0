"""Branches as operators of the graph around them.

Before: `cond`, whose branches are submodels that ExecuTorch's partitioner does not look into. After: the operators of
both branches and a selection. XNNPACK runs them all, where portable kernels would run one branch.
"""

from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.graph import attribute, tensor_value
from quantplug.lowering.xnnpack.conversions import add_constant, call
from quantplug.lowering.xnnpack.rewrites.writing import done, index_of

_ATEN = torch.ops.aten


def conditions_are_selections(model: fx.GraphModule) -> fx.GraphModule:
    """Writes cond(p, f, g, x) as where(p, f(x), g(x)); branches have no effects, so that both may run."""
    while found := _conditions(model):
        for node in found:
            _select(model, node)
    return done(model)


def _conditions(model: fx.GraphModule) -> list[fx.Node]:
    """Returns what depends on a tensor; what depends on a size runs one branch only, and XNNPACK none of it."""
    nodes = model.graph.find_nodes(op="call_function", target=torch.ops.higher_order.cond)
    return [node for node in nodes if tensor_value(node.args[0]) is not None]


def _select(model: fx.GraphModule, node: fx.Node) -> None:
    branches: Any = node.args[1:3]
    predicate, operands = node.args[0], node.args[3]
    with model.graph.inserting_before(node):
        results = [_inlined(model, branch, operands) for branch in branches]
        selected = [call(model.graph, node, _ATEN.where.self, predicate, *pair) for pair in zip(*results, strict=True)]
    for user in list(node.users):
        selected[index_of(user)].meta.update(user.meta)
        user.replace_all_uses_with(selected[index_of(user)])
        model.graph.erase_node(user)
    model.graph.erase_node(node)


def _inlined(model: fx.GraphModule, branch: fx.Node, operands: Any) -> list[Any]:
    """Copies the operators of a branch to the insertion point and returns its results."""
    submodel = attribute(model, str(branch.target))
    known = dict(zip(submodel.graph.find_nodes(op="placeholder"), operands, strict=True))
    known |= {held: _adopted(model, submodel, held) for held in submodel.graph.find_nodes(op="get_attr")}
    results: Any = model.graph.graph_copy(submodel.graph, known)
    return list(results)


def _adopted(model: fx.GraphModule, submodel: Any, held: fx.Node) -> fx.Node:
    """Gives the graph a constant or a submodel that a branch holds."""
    value = attribute(submodel, str(held.target))
    if isinstance(value, Tensor):
        return add_constant(model, model.graph, value, "branch")
    name = f"_quantplug_branch_{sum(1 for _ in model.children())}"
    model.add_submodule(name, value)
    return model.graph.get_attr(name)
