"""Operators that are better left float, because of what stands beside them.

Before: the pieces that rules took. After: those of them that gain nothing. One kind has float readers only, such as
the sum of attention scores and a bias, or the sums of a transformer that only layer norms read. In integers they would
take about as many conversions, and each rounds once more. What layer norms read is the worst to round, as rows of small
numbers are lost beside large ones: a vision transformer of random weights keeps 10 dB with sums of integers and 25 dB
without. The other kind is the first or last layer of a model, alone between float operators and a small part of its
work: what it rounds reaches every result (ends of networks were left float already by DoReFa-Net, Zhou et al. 2016).
"""

from collections.abc import Callable, Sequence

from torch import fx

from quantplug.core.annotation.annotator import Annotator
from quantplug.core.graph.facts import is_constant, tensor_value
from quantplug.core.patterns.matching import Found

FEW_WEIGHTS = 2**20  # of a layer at an end of a model, so that float ones still fit: four megabytes


def better_float(
    pieces: Sequence[Found[Annotator]],
    is_quantized: Callable[[fx.Node], bool],
    reads: Callable[[fx.Node, fx.Node], bool],
) -> list[Found[Annotator]]:
    """Returns the pieces that gain nothing, and the moves behind them, in graph order.

    A piece gains nothing if at least one operator reads it and all that do so are float, or gain nothing themselves.
    What nobody but the graph's output reads stays quantized, and so does what the output takes in integers.

    Args:
        pieces: what rules took, in graph order.
        is_quantized: whether an operator writes integers.
        reads: whether a node (first) reads another in integers.
    """
    light = [found for found in pieces if found.owner.needs_company or found.owner.follows]
    floats: set[fx.Node] = set()
    for found in reversed(light):
        root = found.match.root
        has_readers = any(user.op != "output" for user in root.users)
        if has_readers and not any(reads(user, root) for user in root.users if user not in floats):
            floats.update(found.match.nodes)
    # A move of integers keeps moving integers: they are a fourth of the memory.
    for found in light:
        producers = (found.match[name] for name in found.owner.follows)
        if any(is_quantized(producer) and producer not in floats for producer in producers):
            floats.difference_update(found.match.nodes)
    return [found for found in light if found.match.root in floats]


def small_ends(
    pieces: Sequence[Found[Annotator]],
    share: Callable[[fx.Node], float],
    is_alone: Callable[[Found[Annotator]], bool],
) -> list[tuple[Found[Annotator], float]]:
    """Returns the pieces that stay float at the ends of a model, each with its share of the work.

    Args:
        pieces: what rules took.
        share: which share of the model's multiplications an operator does; asked only if a piece stands alone.
        is_alone: whether a piece reads and writes float.
    """
    ends = [found for found in pieces if found.owner.least_share and _is_end(found)]
    alone = [found for found in ends if is_alone(found)]
    parts = [(found, share(found.match["op"])) for found in alone]
    return [(found, part) for found, part in parts if part < found.owner.least_share]


def _is_end(found: Found[Annotator]) -> bool:
    sources, readers = found.match["op"].all_input_nodes, found.match.root.users
    is_end = any(source.op == "placeholder" for source in sources) or any(user.op == "output" for user in readers)
    return is_end and all(_numel(source) <= FEW_WEIGHTS for source in sources if is_constant(source))


def _numel(node: fx.Node) -> int:
    found = tensor_value(node)
    return 0 if found is None else found.numel()
