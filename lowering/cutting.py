"""A q/dq graph cut into pieces for several engines.

Before: a graph, and for each operator the engine that is to run it. After: pieces in the order in which they run, each
a graph module of one engine's operators with tensors in and out. What is quantized passes as integers: a quantize node
stays with what yields its input, a dequantize node is in every piece that reads it. So are constants, sizes, and what
finds ranges at run time.
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, fx

from quantplug.core.errors import LoweringError
from quantplug.core.graph.facts import is_constant, is_written, written_argument
from quantplug.core.qdq.nodes import is_dynamic, is_qdq, is_quantize

# How many changes of engine lie before a piece, and its engine.
Place: TypeAlias = tuple[int, str]


@dataclass(frozen=True)
class Piece:
    """A part of a graph.

    Attributes:
        engine: what is to run it.
        module: its graph; inputs and outputs are flat.
        takes: names of the nodes of the whole graph that are its inputs.
        gives: names of those that are its outputs.
    """

    engine: str
    module: fx.GraphModule
    takes: tuple[str, ...]
    gives: tuple[str, ...]


def cut(module: fx.GraphModule, engine_of: Callable[[fx.Node], str]) -> list[Piece]:
    """Returns the pieces of a graph in the order in which they run.

    Args:
        module: a graph module that returns tensors, flat; it is not changed.
        engine_of: the engine of an operator.

    Raises:
        LoweringError: two pieces share a buffer that the model writes, or there is nothing to cut.
    """
    nodes = list(module.graph.nodes)
    shared = _shared(nodes)
    places, behind = _places(nodes, shared, engine_of)
    _require_own_buffers(nodes, places)
    order = sorted(set(places.values()))
    if not order:
        raise LoweringError("The graph computes nothing that an engine could run; leave engine out.")
    returned = (node for node in module.graph.output_node().all_input_nodes if node.op != "placeholder")
    homes = {node: max(behind[node], default=order[0]) for node in returned}
    inside = {place: _with_shared(nodes, place, {**homes, **places}, shared) for place in order}
    return [_piece(module, nodes, place, inside, homes) for place in order]


def _shared(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Returns what every piece that reads it has for itself."""
    constants: set[fx.Node] = set()
    found: set[fx.Node] = set()
    for node in nodes:
        sources = node.all_input_nodes
        if is_constant(node) or (sources and constants.issuperset(sources) and written_argument(node) is None):
            constants.add(node)
            found.add(node)
        elif node.op == "call_function" and (_is_number(node) or _is_shared(node, found)):
            found.add(node)
    return found


def _is_number(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return value is not None and not isinstance(value, Tensor | tuple | list)


def _is_shared(node: fx.Node, shared: set[fx.Node]) -> bool:
    source = node.all_input_nodes[0] if node.all_input_nodes else None
    if node.target is operator.getitem:
        return is_qdq(source)
    if is_quantize(node) and not is_dynamic(node):
        return source in shared or (source is not None and source.op == "placeholder")
    return is_qdq(node)


def _places(
    nodes: Iterable[fx.Node], shared: set[fx.Node], engine_of: Callable[[fx.Node], str]
) -> tuple[dict[fx.Node, Place], dict[fx.Node, set[Place]]]:
    """Returns where each node belongs that is computed once, and the places that each node's value comes from."""
    found: dict[fx.Node, Place] = {}
    behind: dict[fx.Node, set[Place]] = {}
    for node in nodes:
        before = set[Place]().union(*(behind[source] for source in node.all_input_nodes))
        behind[node] = before
        is_used = bool(node.users) or written_argument(node) is not None
        if node.op != "call_function" or node in shared or not is_used:
            continue
        follows = is_quantize(node) or node.target is operator.getitem
        own = next((found[source] for source in node.all_input_nodes[:1] if follows and source in found), None)
        engine = own[1] if own else engine_of(node)
        place = max((stage + (other != engine) for stage, other in before), default=0), engine
        found[node], behind[node] = place, {place}
    return found, behind


def _require_own_buffers(nodes: Iterable[fx.Node], places: Mapping[fx.Node, Place]) -> None:
    for node in nodes:
        users = {places[user] for user in node.users if user in places}
        if node.op == "get_attr" and not is_constant(node) and len(users) > 1:
            raise LoweringError(
                f"Buffer '{node.target}' is written by the model and read in several pieces "
                f"({', '.join(engine for _, engine in sorted(users))}); give all that read it one engine."
            )


def _with_shared(
    nodes: list[fx.Node], place: Place, places: Mapping[fx.Node, Place], shared: set[fx.Node]
) -> dict[fx.Node, None]:
    """Returns the nodes of a piece, with those that it has for itself; in graph order."""
    wanted: set[fx.Node] = set()
    for node in reversed(nodes):
        is_buffer = node.op == "get_attr" and any(places.get(user) == place for user in node.users)
        read = node in shared and not wanted.isdisjoint(node.users)
        if places.get(node) == place or is_buffer or read:
            wanted.add(node)
    return dict.fromkeys(node for node in nodes if node in wanted)


def _piece(
    module: fx.GraphModule,
    nodes: list[fx.Node],
    place: Place,
    inside: Mapping[Place, Mapping[fx.Node, None]],
    homes: Mapping[fx.Node, Place],
) -> Piece:
    own = inside[place]
    ordered = [node for node in nodes if node in own]
    takes = dict.fromkeys(s for node in ordered for s in node.all_input_nodes if s not in own)
    elsewhere = {
        s for other, held in inside.items() if other != place for n in held for s in n.all_input_nodes if s not in held
    }
    gives = [node for node in ordered if node in elsewhere or homes.get(node) == place]
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in takes:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = {"val": node.meta.get("val")}
    for node in filter(is_written, takes):  # what an operator of the piece may write is a copy of its own
        copies[node] = graph.call_function(torch.ops.aten.clone.default, (copies[node],))
        copies[node].meta = {"val": node.meta.get("val")}
    for node in ordered:
        copies[node] = graph.node_copy(node, lambda source: copies[source])
    graph.output(tuple(copies[node] for node in gives))
    names = (tuple(node.name for node in part) for part in (takes, gives))
    return Piece(place[1], fx.GraphModule(module, graph), *names)
