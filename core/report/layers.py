"""The layers of a q/dq graph: what runs as one kernel, with the numbers that it reads and writes.

Before: a converted graph, of any quantizer. After: for each input and each fused piece of operators a `Piece`, which
knows the node whose value the layer yields, the quantize nodes behind it and the constants that it reads. Nothing but
the graph is asked, so that a graph that was edited, or that another library wrote, has layers too.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from quantplug.core.graph.constants import constant_nodes
from quantplug.core.graph.facts import compute_nodes, operands, sizes_of, sole_user
from quantplug.core.graph.multiplications import multiplications
from quantplug.core.graph.operators import IDENTITIES, MAXIMA, MOVES, PADS, REPEATS, overloads_of
from quantplug.core.graph.traits import clamp_bounds
from quantplug.core.graph.union_find import UnionFind
from quantplug.core.qdq.nodes import is_dequantize, is_dynamic, is_qdq, is_quantize
from quantplug.core.qdq.qparams import static_qparams
from quantplug.core.specs.decision import decision

# No result has a number that the operand has not, so that what was rounded before is not rounded again.
_PASS_ON = overloads_of((*MOVES, *REPEATS, *IDENTITIES, *PADS, *MAXIMA))


@dataclass(frozen=True)
class Rounding:
    """One way from a float value to a reader: a quantize node and the dequantize nodes that its readers read.

    Attributes:
        quantize: the node that rounds.
        back: what the readers read.
    """

    quantize: fx.Node
    back: fx.Node


@dataclass(frozen=True)
class Piece:
    """One layer of a q/dq graph.

    Attributes:
        root: the operator that gives the layer its name: the one with the most multiplications; or an input.
        end: the node whose value the layer yields, before it is rounded.
        nodes: all of its operators, in graph order.
        roundings: what rounds the value, in graph order, a second rounding of the same value included.
        constants: operands of the root that are the same at every call, by their names in the schema.
        passes_on: whether it only puts numbers elsewhere, and rounds none that was not rounded before.
    """

    root: fx.Node
    end: fx.Node
    nodes: tuple[fx.Node, ...]
    roundings: tuple[Rounding, ...]
    constants: dict[str, fx.Node]
    passes_on: bool = False

    @property
    def reads_integers(self) -> bool:
        """Whether one of its operators reads numbers that were rounded, its weights or what comes in."""
        return any(is_dequantize(source) for node in self.nodes for source in node.all_input_nodes)

    @property
    def sources(self) -> tuple[fx.Node, ...]:
        """The activations that it reads, as they are before they are rounded, each once."""
        inside, constants = set(self.nodes), set(self.constants.values())
        read = (source for node in self.nodes for source in node.all_input_nodes if source not in constants)
        outside = (source for source in map(origin, read) if source not in inside)
        return tuple(dict.fromkeys(source for source in outside if source.op != "get_attr"))


def origin(node: fx.Node) -> fx.Node:
    """Returns what yields a value before it is rounded, once or several times."""
    while is_qdq(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def rounds_activations(node: fx.Node, constants: set[fx.Node]) -> bool:
    """Tells whether a node quantizes or dequantizes an activation with numbers known beforehand."""
    return (
        is_qdq(node) and node not in constants and not is_dynamic(node) and (is_quantize(node) or is_dequantize(node))
    )


def pieces(graph: fx.Graph) -> tuple[Piece, ...]:
    """Returns the layers of a graph: its quantized inputs, then its operators, in graph order.

    Args:
        graph: of a converted model; operators of constants alone are no layers.
    """
    constants = fixed_nodes(graph)
    inputs = [node for node in graph.nodes if node.op == "placeholder" and any(map(is_quantize, node.users))]
    groups = [tuple(group) for group in _groups(graph, constants)]
    return (*(_piece((node,), constants) for node in inputs), *(_piece(group, constants) for group in groups))


def fixed_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes that yield the same at every call, torchao's operators of blocks included."""
    found = constant_nodes(graph)
    for node in graph.nodes:
        if is_qdq(node) and node.all_input_nodes and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def _groups(graph: fx.Graph, constants: set[fx.Node]) -> Iterator[list[fx.Node]]:
    computing = [node for node in compute_nodes(graph) if not is_qdq(node) and node not in constants]
    joined = UnionFind(computing)
    roots: dict[str, fx.Node] = {}
    for node in computing:
        decided = decision(node)
        if decided is not None and decided.quantized:
            joined.join(roots.setdefault(decided.root, node), node)
        source = _fused_into(node, constants)
        if decided is None and source is not None and source in joined:
            joined.join(source, node)
    yield from joined.groups()


def _fused_into(node: fx.Node, constants: set[fx.Node]) -> fx.Node | None:
    """Returns the operator whose kernel takes another one along: only it reads the result, and rounds its own."""
    tags = getattr(node.target, "tags", ())
    if torch.Tag.pointwise not in tags or not node.users or not all(map(is_quantize, node.users)):
        return None
    if (clamped := _clamped(node)) is not None:
        return clamped
    read = [source for source in node.all_input_nodes if not is_qdq(source) and source not in constants]
    source = read[0] if len(read) == 1 and sole_user(read[0]) is node else None
    is_alike = source is not None and sizes_of(source) == sizes_of(node)
    return source if is_alike and source is not None and any(map(is_dequantize, source.all_input_nodes)) else None


def _clamped(node: fx.Node) -> fx.Node | None:
    """Returns whose result is rounded, clamped, and rounded to the same integers again: it was the clamp's rounding.

    AIMET writes a relu like that, with integers for what the relu leaves: all that it takes away seems clipped.
    """
    back = node.all_input_nodes[0] if clamp_bounds(node) is not None else None
    numbers = static_qparams(back) if back is not None and is_dequantize(back) and sole_user(back) is node else None
    if back is None or numbers is None or any(static_qparams(user) != numbers for user in node.users):
        return None
    quantize = back.all_input_nodes[0]
    source = (
        quantize.all_input_nodes[0] if static_qparams(quantize) == numbers and sole_user(quantize) is back else None
    )
    return source if source is not None and sole_user(source) is quantize else None


def _piece(nodes: tuple[fx.Node, ...], constants: set[fx.Node]) -> Piece:
    end, root = nodes[-1], max(nodes, key=multiplications)
    read = {name: value for name, value in operands(root).items() if isinstance(value, fx.Node) and value in constants}
    roundings = tuple(_roundings(end))
    is_rounded_before = any(is_dequantize(source) for source in nodes[0].all_input_nodes)
    passes_on = all(node.target in _PASS_ON for node in nodes) and (is_rounded_before or not roundings)
    return Piece(root, end, nodes, roundings, read, passes_on)


def _roundings(value: fx.Node) -> Iterator[Rounding]:
    """Yields what rounds a float value, and what rounds it again."""
    for quantize in [user for user in value.users if is_quantize(user) and not is_dynamic(user)]:
        for back in [user for user in quantize.users if is_dequantize(user)]:
            yield Rounding(quantize, back)
            yield from _roundings(back)
