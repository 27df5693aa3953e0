"""Operators that are worth quantizing only beside other integer operators.

Before: the pieces that rules took. After: those of them that are better left float, such as the sum of attention scores
and a bias, or the sums of a transformer that only layer norms read: in integers they would take as many conversions or
more, and each rounds once more. What layer norms read is the worst to round, as rows of small numbers are lost beside
large ones: a vision transformer of random weights keeps 10 dB with sums of integers and 25 dB without.
"""

from collections.abc import Callable, Iterable

from torch import fx

from quantplug.core.annotator import Annotator
from quantplug.core.matching import Found


def better_float(
    pieces: Iterable[Found[Annotator]],
    constants: set[fx.Node],
    in_integers: Callable[[fx.Node, fx.Node], bool],
) -> set[Found[Annotator]]:
    """Returns the pieces that need company and do not gain by it; moves between them included.

    Connected pieces are judged together. They are better float if no integer operator reads them, and if integers would
    take no fewer conversions, one for each tensor that passes from float to integers or back. The inputs and outputs of
    the graph count for neither side.

    Args:
        pieces: what rules took.
        constants: nodes that count for nothing.
        in_integers: whether a (producer, user) edge between a piece and a neighbour carries integers.
    """
    light = [found for found in pieces if found.owner.needs_company or found.owner.follows]
    piece_of = {node: found for found in light for node in found.match.nodes}
    left: set[Found[Annotator]] = set()
    seen: set[Found[Annotator]] = set()
    for found in light:
        if not found.owner.needs_company or found in seen:
            continue
        region, edges = _region(found, piece_of)
        seen |= region
        edges = [edge for edge in edges if edge[0] not in constants]
        integers = [edge for edge in edges if in_integers(*edge)]
        floats = {a for a, b in edges if a.op == b.op == "call_function"} - {a for a, _ in integers}
        is_read = any(producer in piece_of for producer, _ in integers)
        if floats and not is_read and len({producer for producer, _ in integers}) <= len(floats):
            left |= region
    return left


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
