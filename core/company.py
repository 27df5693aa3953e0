"""Operators that are worth quantizing only beside other integer operators.

Before: the pieces that rules took. After: those of them that only float operators write and read, such as the sum of
attention scores and a bias. There the conversions around an operator cost more than its integer kernel gains, and each
rounds once.
"""

from collections.abc import Callable, Iterable

from torch import fx

from quantplug.core.annotator import Annotator
from quantplug.core.matching import Found


def among_floats(
    pieces: Iterable[Found[Annotator]],
    constants: set[fx.Node],
    in_integers: Callable[[fx.Node, fx.Node], bool],
) -> set[Found[Annotator]]:
    """Returns the pieces that need company and have none; moves between them included.

    Connected pieces are judged together. They stay if one of their neighbours is quantized, or if no operator writes
    what they read: a graph of sums alone is quantized.

    Args:
        pieces: what rules took.
        constants: nodes that count for nothing.
        in_integers: whether a (producer, user) edge between a piece and a neighbour carries integers.
    """
    light = [found for found in pieces if found.owner.needs_company or found.owner.follows]
    piece_of = {node: found for found in light for node in found.match.nodes}
    alone: set[Found[Annotator]] = set()
    seen: set[Found[Annotator]] = set()
    for found in light:
        if not found.owner.needs_company or found in seen:
            continue
        region, edges = _region(found, piece_of)
        seen |= region
        edges = [edge for edge in edges if edge[0] not in constants]
        computed = any(producer.op == "call_function" and producer not in piece_of for producer, _ in edges)
        if computed and not any(in_integers(*edge) for edge in edges):
            alone |= region
    return alone


def _region(
    start: Found[Annotator], piece_of: dict[fx.Node, Found[Annotator]]
) -> tuple[set[Found[Annotator]], list[tuple[fx.Node, fx.Node]]]:
    """Returns all light pieces that hang together with one, and the edges between them and others."""
    region, edges, waiting = {start}, list[tuple[fx.Node, fx.Node]](), [start]
    while waiting:
        for node in waiting.pop().match.nodes:
            for edge in (*((source, node) for source in node.all_input_nodes), *((node, user) for user in node.users)):
                other = next(piece_of.get(end) for end in edge if end is not node)
                if other is None:
                    edges.append(edge)
                elif other not in region:
                    region.add(other)
                    waiting.append(other)
    return region, edges
