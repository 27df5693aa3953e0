"""Operators that are better left float where only float operators read their result.

Before: the pieces that rules took. After: those of them that gain nothing, such as the sum of attention scores and a
bias, or the sums of a transformer that only layer norms read. In integers they would take about as many conversions,
and each rounds once more. What layer norms read is the worst to round, as rows of small numbers are lost beside large
ones: a vision transformer of random weights keeps 10 dB with sums of integers and 25 dB without.
"""

from collections.abc import Callable, Sequence

from torch import fx

from quantplug.core.annotator import Annotator
from quantplug.core.matching import Found


def better_float(
    pieces: Sequence[Found[Annotator]],
    is_quantized: Callable[[fx.Node], bool],
    reads: Callable[[fx.Node, fx.Node], bool],
) -> list[Found[Annotator]]:
    """Returns the pieces that gain nothing, and the moves behind them, in graph order.

    A piece gains nothing if at least one operator reads it and all that do so are float, or gain nothing themselves.
    What nobody but the graph's output reads stays quantized.

    Args:
        pieces: what rules took, in graph order.
        is_quantized: whether an operator writes integers.
        reads: whether a node (first) reads another in integers.
    """
    light = [found for found in pieces if found.owner.needs_company or found.owner.follows]
    floats: set[fx.Node] = set()
    for found in reversed(light):
        root = found.match.root
        readers = [user for user in root.users if user.op != "output"]
        if readers and not any(reads(user, root) for user in readers if user not in floats):
            floats.update(found.match.nodes)
    # A move of integers keeps moving integers: they are a fourth of the memory.
    for found in light:
        producers = (found.match[name] for name in found.owner.follows)
        if any(is_quantized(producer) and producer not in floats for producer in producers):
            floats.difference_update(found.match.nodes)
    return [found for found in light if found.match.root in floats]
