"""Parts of a graph that are run again on the way back, so that what they compute need not wait for the gradients.

Before: a graph that is run node by node. After: its nodes in stretches of about the same memory, each with what it
reads of those before it and what those behind it read (Chen et al., "Training Deep Nets with Sublinear Memory Cost",
arXiv:1604.06174).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from torch import fx

from quantplug.core.graph.facts import is_float, is_written, likely_sizes, tensor_value

# Bytes of results in a stretch, more or less.
BUDGET = 2**25


@dataclass(frozen=True)
class Stretch:
    """Nodes that follow each other.

    Attributes:
        start: the first.
        stop: the one behind the last, the graph's root behind its last node.
        reads: the inputs and the nodes before it that it reads.
        drops: those of them that no later one reads.
        yields: those of its nodes that later ones read.
    """

    start: fx.Node
    stop: fx.Node
    reads: tuple[fx.Node, ...]
    drops: tuple[fx.Node, ...]
    yields: tuple[fx.Node, ...]


def stretches_of(graph: fx.Graph, holds_apart: Callable[[fx.Node], bool]) -> list[Stretch]:
    """Returns a graph in stretches; one where an operator writes into memory, which it must not do twice.

    Args:
        graph: the graph.
        holds_apart: tells whether a node's result must be read in the stretch that computes it.
    """
    inputs, nodes = graph.find_nodes(op="placeholder"), [node for node in graph.nodes if node.op != "placeholder"]
    starts = [0] if any(map(is_written, graph.nodes)) else _starts(nodes, holds_apart)
    parts = [nodes[start:stop] for start, stop in pairwise([*starts, len(nodes)])]
    place_of = dict.fromkeys(inputs, -1) | {node: place for place, part in enumerate(parts) for node in part}
    last = {node: max((place_of[user] for user in node.users), default=-1) for node in place_of}
    found = []
    for place, part in enumerate(parts):
        reads = dict.fromkeys(each for node in part for each in node.all_input_nodes if place_of[each] < place)
        drops = tuple(node for node in reads if last[node] == place)
        yields = tuple(node for node in part if last[node] > place)
        found.append(Stretch(part[0], part[-1].next, tuple(reads), drops, yields))
    return found


def _starts(nodes: list[fx.Node], holds_apart: Callable[[fx.Node], bool]) -> list[int]:
    """Returns the places at which stretches begin."""
    last = {read: place for place, node in enumerate(nodes) for read in node.all_input_nodes}
    starts, held, size = [0], -1, 0
    for place, node in enumerate(nodes):
        if size > BUDGET and place > held:
            starts.append(place)
            size = 0
        size += _bytes(node)
        if holds_apart(node):
            held = max(held, last.get(node, place))
    return starts


def _bytes(node: fx.Node) -> int:
    """Returns what a result takes that an operator may keep for its gradient."""
    value = tensor_value(node)
    if node.op != "call_function" or value is None or not is_float(node):
        return 0
    return value.element_size() * math.prod(likely_sizes(node))
