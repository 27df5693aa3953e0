"""Submodels of scoped modes as operators of the graph around them.

Before: `no_grad` and autocast that is off, as higher-order operators that call a submodel. After: its operators in
their place. A program computes no gradients and enters no autocast, so that the scope says nothing that matters.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from quantplug.core.errors import LoweringError
from quantplug.core.graph.editing import register
from quantplug.core.graph.facts import attribute

_HIGHER = torch.ops.higher_order


def inline_scopes(model: fx.GraphModule) -> None:
    """Replaces every scope without meaning by its operators, also those inside of others, in place."""
    while found := [node for node in model.graph.nodes if is_scope(node)]:
        for node in found:
            settings = 1 if node.target is _HIGHER.wrap_with_set_grad_enabled else 4
            with model.graph.inserting_before(node):
                results = inlined(model, node.args[settings], node.args[settings + 1 :])
            replace_results(node, results)


def is_scope(node: fx.Node) -> bool:
    """Tells whether a node runs a submodel without gradients, with them, or with autocast off."""
    is_off = node.target is _HIGHER.wrap_with_autocast and not node.args[2]
    return node.target is _HIGHER.wrap_with_set_grad_enabled or is_off


def require_no_autocast(graph: fx.Graph, who: str) -> None:
    """Checks that no layer runs under autocast that is on.

    Args:
        graph: of a lowering's own copy, whose other scopes are inlined.
        who: what does not read it, as the sentence says it.

    Raises:
        LoweringError: one does.
    """
    scope = next(iter(graph.find_nodes(op="call_function", target=_HIGHER.wrap_with_autocast)), None)
    if scope is not None:
        raise LoweringError(
            f"Node '{scope.name}' runs layers under autocast to {scope.args[1]}, which {who} not read; export the "
            "model without autocast, or use backend 'x86'."
        )


def replace_results(node: fx.Node, results: list[Any]) -> None:
    """Gives the users of an operator of several results what stands for each, and erases it."""
    for user in list(node.users):
        index: Any = user.args[1]  # of `getitem`, the only operator that reads several results
        user.replace_all_uses_with(results[index])
        node.graph.erase_node(user)
    node.graph.erase_node(node)


def inlined(model: fx.GraphModule, held: Any, operands: Any) -> list[Any]:
    """Copies the operators of a submodel to the insertion point and returns its results.

    Args:
        model: the graph module around it.
        held: the node that reads the submodel.
        operands: what it is called with.
    """
    submodel = attribute(model, str(held.target))
    known: dict[fx.Node, Any] = dict(zip(submodel.graph.find_nodes(op="placeholder"), operands, strict=True))
    known |= _adopted(model, submodel, submodel.graph.find_nodes(op="get_attr"))
    results: Any = model.graph.graph_copy(submodel.graph, known)
    return list(results)


def _adopted(model: fx.GraphModule, submodel: fx.GraphModule, inner: Any) -> Mapping[fx.Node, fx.Node]:
    """Gives the graph what a submodel holds, each tensor and submodel once."""
    names: dict[str, str] = {}
    found = {}
    for node in inner:
        target = str(node.target)
        if target not in names:
            names[target] = register(model, "inlined", attribute(submodel, target))
        found[node] = model.graph.get_attr(names[target])
        found[node].meta = dict(node.meta)
    return found
