"""Which nodes of a graph compute the same value at every call, and what that value is.

Before: an exported graph with parameters, buffers and lifted constants as `get_attr` nodes. After: the
set of nodes that depend on nothing else, without mutable buffers and random numbers.
"""

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from quantplug.core.graph.facts import (
    constant_value,
    is_written,
    observer_of,
    operator_name,
    viewed_node,
    written_argument,
)
from quantplug.core.peers.torch_names import OpOverload, schema_of


def constant_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes whose tensors are the same at every call; observers between them included.

    A buffer that the graph writes to, and every view of it, is no constant. Linear in the graph.
    """
    written = written_buffers(graph)
    constant: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "get_attr":
            if str(node.target) not in written and constant_value(node) is not None:
                constant.add(node)
        elif _is_pure(node) and node.all_input_nodes and all(n in constant for n in node.all_input_nodes):
            constant.add(node)
    return constant


def _is_pure(node: fx.Node) -> bool:
    if node.op == "call_module":
        return observer_of(node) is not None
    target = node.target
    if node.op == "call_function" and target is operator.getitem:
        return True
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return False
    return not schema_of(target).is_mutable and torch.Tag.nondeterministic_seeded not in target.tags


def written_buffers(graph: fx.Graph) -> set[str]:
    """Returns the paths of the attributes that an in-place operator of the graph may write to, submodels' included."""
    by_submodels = (str(node.target) for node in graph.find_nodes(op="get_attr") if is_written(node))
    return {path for _, paths in _writes(graph) for path in paths}.union(by_submodels)


def buffer_writes(graph: fx.Graph) -> set[tuple[fx.Node, fx.Node]]:
    """Returns the (producer, consumer) edges on the way from an attribute to an operator that writes to it.

    Nothing may come between them: the operator would write into a copy.
    """
    edges: set[tuple[fx.Node, fx.Node]] = set()
    for node, paths in _writes(graph):
        consumer = node
        while paths and consumer.op != "get_attr":
            edge = (consumer.all_input_nodes[0], consumer)
            if edge in edges:
                break
            edges.add(edge)
            consumer = edge[0]
    return edges


def _writes(graph: fx.Graph) -> Iterator[tuple[fx.Node, frozenset[str]]]:
    """Yields every in-place operator with the attributes that its first argument may be a view of."""
    origins: dict[fx.Node, frozenset[str]] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            origins[node] = frozenset((str(node.target),))
        elif node.op == "call_module" and node.all_input_nodes:
            # An observer returns what it is given.
            origins[node] = origins.get(node.all_input_nodes[0], frozenset())
        elif node.op == "call_function":
            destination = written_argument(node)
            if destination is not None:
                yield node, origins.get(destination, frozenset())
            viewed = viewed_node(node)
            origins[node] = frozenset() if viewed is None else origins.get(viewed, frozenset())


def evaluate_constants(nodes: Iterable[fx.Node], wanted: set[fx.Node]) -> dict[fx.Node, Tensor]:
    """Returns the values of the wanted constant nodes.

    Args:
        nodes: the constant nodes in graph order.
        wanted: those whose values are needed; only what they depend on is computed.
    """
    ordered = list(nodes)
    needed = set(wanted)
    for node in reversed(ordered):
        if node in needed:
            needed.update(node.all_input_nodes)
    values: dict[fx.Node, Any] = {}
    with torch.no_grad():
        for node in ordered:
            if node in needed:
                values[node] = _evaluate(node, values)
    return {node: values[node] for node in wanted if isinstance(values.get(node), Tensor)}


def _evaluate(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    if node.op == "get_attr":
        return constant_value(node)
    if node.op == "call_module":
        # An observer returns what it is given.
        return values[node.all_input_nodes[0]]
    return computed(node, values.__getitem__)


def computed(node: fx.Node, value_of: Callable[[fx.Node], Any]) -> Any:
    """Returns what an operator yields where the nodes that it reads have these values, fake ones too."""
    target: Any = node.target
    args, kwargs = map_arg((node.args, node.kwargs), value_of)
    return target(*args, **kwargs)


def is_expression(node: fx.Node) -> bool:
    """Tells whether a node is an expression over constants, whose value `expression_value` computes."""
    if node.op == "get_attr":
        return constant_value(node) is not None
    return bool(operator_name(node) and node.all_input_nodes) and all(map(is_expression, node.all_input_nodes))


def expression_value(node: fx.Node) -> Tensor | None:
    """Returns the value of an expression over constants, None if any part of it is computed at run time."""
    if node.op == "get_attr":
        return constant_value(node)
    if not is_expression(node):
        return None
    result = computed(node, {source: expression_value(source) for source in node.all_input_nodes}.__getitem__)
    return result if isinstance(result, Tensor) else None
