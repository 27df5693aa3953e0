"""Submodels that control flow and scoped modes call: `cond`, `while_loop`, `scan`, `map`, `no_grad`, autocast.

Before: a graph whose higher-order operators take graph modules by `get_attr`, and everything that these
need as operands, weights included. After: the attributes of those that compute tensors, so that prepare
and convert treat each as they treat the graph around it; and weights inside of the submodel that uses
them, where quantizers recognize them as constants and convert stores them as integers.
"""

from collections import Counter
from typing import Any

import torch
from torch import fx
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from quantplug.core.graph.constants import written_buffers
from quantplug.core.graph.control import operator_of
from quantplug.core.graph.editing import constant
from quantplug.core.graph.facts import attribute, held_tensor, is_constant
from quantplug.core.graph.meta import LIFTED
from quantplug.core.graph.working_copy import rebuilt
from quantplug.core.peers.torch_names import HigherOrderOperator

_HIGHER = torch.ops.higher_order
# Where an operator has the operands that it passes on as they are, after all others of its submodels.
_PASSED_ON = {_HIGHER.cond: 3, _HIGHER.map_impl: 2, _HIGHER.scan: 3, _HIGHER.while_loop: 3}


def submodel_targets(model: fx.GraphModule) -> list[str]:
    """Returns the attributes of the submodels that a graph's higher-order operators call, in graph order.

    The condition of a `while_loop` is left out: its result is a decision and must not be rounded.
    """
    found: dict[str, None] = {}
    for node in _higher_order(model.graph):
        skipped = node.args[0] if operator_of(node) is _HIGHER.while_loop else None
        for argument in _submodels(model, node):
            if argument is not skipped:
                found[str(argument.target)] = None
    return list(found)


def bind_constants(model: fx.GraphModule) -> None:
    """Moves constants that a higher-order operator passes on into the submodels that use them, in place.

    A submodel that several operators call keeps its operands, and so do buffers that the graph writes to.
    """
    nodes = _higher_order(model.graph)
    if not nodes:
        return
    uses = Counter(str(argument.target) for node in nodes for argument in _submodels(model, node))
    written = written_buffers(model.graph)
    for node in nodes:
        submodels = [attribute(model, str(n.target)) for n in _submodels(model, node)]
        if submodels and all(uses[str(n.target)] == 1 for n in _submodels(model, node)):
            _bind(node, submodels, written)


def _higher_order(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if isinstance(operator_of(n), HigherOrderOperator)]


def _submodels(model: fx.GraphModule, node: fx.Node) -> list[fx.Node]:
    constants = [n for n in node.all_input_nodes if n.op == "get_attr"]
    return [n for n in constants if isinstance(attribute(model, str(n.target)), fx.GraphModule)]


def _bind(node: fx.Node, submodels: list[fx.GraphModule], written: set[str]) -> None:
    passed_on = _passed_on(node)
    bound = [
        i
        for i, operand in enumerate(passed_on)
        if isinstance(operand, fx.Node) and held_tensor(operand) is not None and operand.target not in written
    ]
    for submodel in submodels:
        inputs = submodel.graph.find_nodes(op="placeholder")[-len(passed_on) :]
        for i in bound:
            _replace_input(submodel, inputs[i], passed_on[i])
        submodel.recompile()
    _keep_operands(node, [operand for i, operand in enumerate(passed_on) if i not in bound])


def _passed_on(node: fx.Node) -> list[fx.Node]:
    """Returns the operands that are the last inputs of every submodel of an operator."""
    if node.target in _PASSED_ON:
        return list(node.args[_PASSED_ON[node.target]])  # type: ignore[arg-type]
    return list(node.args[_first_operand(node) :])  # type: ignore[arg-type]


def _first_operand(node: fx.Node) -> int:
    """Returns the position after the submodel; the operators of scoped modes take their operands flat."""
    positions = [i for i, a in enumerate(node.args) if isinstance(a, fx.Node) and a.op == "get_attr"]
    return positions[0] + 1 if positions else len(node.args)


def _keep_operands(node: fx.Node, kept: list[fx.Node]) -> None:
    if node.target not in _PASSED_ON:
        node.args = (*node.args[: _first_operand(node)], *kept)
        return
    position = _PASSED_ON[node.target]
    # `map` has a list there, the others have a tuple, and each insists on its own.
    node.update_arg(position, kept if isinstance(node.args[position], list) else tuple(kept))


def _replace_input(submodel: fx.GraphModule, given: fx.Node, outside: fx.Node) -> None:
    if given.users:
        value = held_tensor(outside)
        assert value is not None
        inside = constant(given, str(outside.target), value)
        inside.meta = {k: v for k, v in outside.meta.items() if k != Q_ANNOTATION_KEY}
        given.replace_all_uses_with(inside)
    submodel.graph.erase_node(given)


def lift_constants(model: fx.GraphModule, submodels: dict[str, fx.GraphModule]) -> dict[str, fx.GraphModule]:
    """Moves the tensors that submodels hold back into the graph around them, which passes them on as operands.

    `torch.export` takes control flow only so: a tensor that a submodel holds is lost in non-strict mode of torch 2.13.

    Args:
        model: a graph module to be edited, in place.
        submodels: its converted submodels by attribute.

    Returns:
        The submodels that take the place of those; a submodel that several operators call stays as it is.
    """
    nodes = _higher_order(model.graph)
    uses = Counter(str(argument.target) for node in nodes for argument in _submodels(model, node))
    lifted = dict(submodels)
    for node in nodes:
        paths = [str(n.target) for n in _submodels(model, node)]
        if paths and all(uses[path] == 1 for path in paths):
            lifted |= _lift(model, node, {path: lifted.get(path, attribute(model, path)) for path in paths})
    return lifted


def _lift(model: fx.GraphModule, node: fx.Node, submodels: dict[str, fx.GraphModule]) -> dict[str, fx.GraphModule]:
    ends: dict[str, Any] = {path: _placeholders_first(submodel.graph) for path, submodel in submodels.items()}
    operands = _passed_on(node)
    for owner, submodel in submodels.items():
        for held in [n for n in submodel.graph.nodes if held_tensor(n) is not None]:
            value, is_same = held_tensor(held), is_constant(held)
            assert value is not None
            operands.append(constant(node, f"{owner}_{held.target}", value))
            operands[-1].meta = dict(held.meta)
            for path, other in submodels.items():
                ends[path] = _add_input(other.graph, ends[path], str(operands[-1].target))
            given = ends[owner]
            given.meta = dict(held.meta)
            LIFTED.put(given, is_same)
            held.replace_all_uses_with(given)
            submodel.graph.erase_node(held)
    _keep_operands(node, operands)
    return {path: rebuilt(submodel) for path, submodel in submodels.items()}


def _placeholders_first(graph: fx.Graph) -> fx.Node | None:
    """Moves a graph's inputs to its front, so that more can follow; returns the last of them."""
    end: fx.Node | None = None
    first = next(iter(graph.nodes))
    for node in graph.find_nodes(op="placeholder"):
        if end is not None:
            end.append(node)
        elif node is not first:
            first.prepend(node)
        end = node
    return end


def _add_input(graph: fx.Graph, end: fx.Node | None, name: str) -> fx.Node:
    place = graph.inserting_before(next(iter(graph.nodes))) if end is None else graph.inserting_after(end)
    with place:
        return graph.placeholder(name)
