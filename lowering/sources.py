"""Which operators of a q/dq graph the nodes of a graph that was exported again carry out.

Before: a graph that a lowering rewrote, whose nodes know their operators, and what export made of it. After: the names
of operators for each node of the latter.
"""

from collections.abc import Iterable, Mapping, Set

from torch import fx

from quantplug.core.graph.meta import origins


def sources(nodes: Iterable[fx.Node], lowered: fx.Graph, operators: Set[str]) -> dict[str, frozenset[str]]:
    """Returns for each node of a decomposed graph the operators of the q/dq graph that it carries out.

    Export names nodes anew by their operators: what a name says counts from the lowered graph on. Histories go on to
    the export before, where what was inserted since has the name of the operator that it is like.
    """
    carried = {node.name: origins(node) for node in lowered.nodes}
    return {node.name: _carried_out(node, id(lowered), carried, operators) for node in nodes}


def _carried_out(
    node: fx.Node, lowered: int, carried: Mapping[str, frozenset[str]], operators: Set[str]
) -> frozenset[str]:
    name, history, is_reached = node.name, node.meta.get("from_node"), False
    while history and not (is_reached and name in operators):
        source = history[-1]
        name, history = source.name, source.from_node
        if source.graph_id == lowered:
            is_reached = True
            if carried.get(name):
                return carried[name]
    return frozenset({name})
