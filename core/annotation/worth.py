"""Operators that are better left float, because of what stands beside them.

Before: the pieces that rules took. After: those of them that gain nothing are float again. One kind has float readers
only, such as the sum of attention scores and a bias, or the sums of a transformer that only layer norms read. In
integers they would take about as many conversions, and each rounds once more. What layer norms read is the worst to
round, as rows of small numbers are lost beside large ones: a vision transformer of random weights keeps 10 dB with sums
of integers and 25 dB without. The other kind is the first or last layer of a model, alone between float operators and a
small part of its work: what it rounds reaches every result (ends of networks were left float already by DoReFa-Net,
Zhou et al. 2016).
"""

from collections.abc import Sequence

from torch import fx

from quantplug.core.annotation.annotator import Choice, Piece
from quantplug.core.annotation.claims import Claims
from quantplug.core.annotation.configs import Configs
from quantplug.core.annotation.surroundings import Surroundings
from quantplug.core.graph.facts import is_constant, tensor_value

FEW_WEIGHTS = 2**20  # of a layer at an end of a model, so that float ones still fit: four megabytes
_FLOAT_READERS = "only float operators read its result"


def leave_float(pieces: Sequence[Piece], claims: Claims, configs: Configs, surroundings: Surroundings) -> None:
    """Leaves in float what gains nothing in integers: operators, and outputs of those whose kernels can write float.

    Args:
        pieces: what rules took, in graph order.
        claims: what they annotated.
        configs: what users asked for.
        surroundings: the graph.
    """
    for piece in _with_float_readers(pieces, claims):
        claims.refuse(piece, _FLOAT_READERS)
    for piece in reversed(pieces):
        _release_output(piece, claims)
    ends = [piece for piece in pieces if piece.owner.least_share and _is_end(piece)]
    alone = [piece for piece in ends if _stands_alone(piece, configs.of(piece.match["op"]), claims, surroundings)]
    for piece in alone:
        share = surroundings.share(piece.match["op"])
        if share < piece.owner.least_share:
            where = "at an end of the model, alone between float operators"
            claims.refuse(piece, f"it stands {where}, and does {100 * share:.1g} % of its multiplications")


def _with_float_readers(pieces: Sequence[Piece], claims: Claims) -> list[Piece]:
    """Returns the pieces that gain nothing, and the moves behind them, in graph order.

    A piece gains nothing if at least one operator reads it and all that do so are float, or gain nothing themselves.
    What nobody but the graph's output reads stays quantized, and so does what the output takes in integers.
    """
    light = [piece for piece in pieces if piece.owner.needs_company or piece.owner.follows]
    floats: set[fx.Node] = set()
    for piece in reversed(light):
        root = piece.match.root
        has_readers = any(user.op != "output" for user in root.users)
        if has_readers and not any(claims.reads(user, root) for user in root.users if user not in floats):
            floats.update(piece.match.nodes)
    # A move of integers keeps moving integers: they are a fourth of the memory.
    for piece in light:
        producers = (piece.match[name] for name in piece.owner.follows)
        if any(claims.is_quantized(producer) and producer not in floats for producer in producers):
            floats.difference_update(piece.match.nodes)
    return [piece for piece in light if piece.match.root in floats]


def _release_output(piece: Piece, claims: Claims) -> None:
    """Leaves the output of a kernel that can write float in float if only float operators read it.

    Called from the last piece to the first: a move or a join that nobody reads in integers goes too.
    """
    root = piece.match.root
    if piece not in claims or not piece.owner.writes_float or any(claims.reads(user, root) for user in root.users):
        return
    if piece.owner.follows or piece.owner.output == "shared":
        claims.refuse(piece, _FLOAT_READERS)
    else:
        claims.annotations[root].output_qspec = None
        _release_summands(piece, claims)


def _release_summands(piece: Piece, claims: Claims) -> None:
    """Leaves in float what a kernel adds to a float result; products keep their integers."""
    summands = {piece.match[name] for name in piece.owner.adds}
    for node in set(piece.match.nodes) - {piece.match["op"]}:
        read = claims.annotations[node].input_qspec_map
        claims.annotations[node].input_qspec_map = {n: spec for n, spec in read.items() if n not in summands}


def _is_end(piece: Piece) -> bool:
    sources, readers = piece.match["op"].all_input_nodes, piece.match.root.users
    is_end = any(source.op == "placeholder" for source in sources) or any(user.op == "output" for user in readers)
    return is_end and all(_numel(source) <= FEW_WEIGHTS for source in sources if is_constant(source))


def _numel(node: fx.Node) -> int:
    found = tensor_value(node)
    return 0 if found is None else found.numel()


def _stands_alone(piece: Piece, choice: Choice, claims: Claims, surroundings: Surroundings) -> bool:
    """Tells whether a piece between float operators quantizes its input, with ranges that calibration fixes."""
    spec = choice.config.input_activation if choice.config else None
    if piece not in claims or choice.is_named or spec is None or spec.is_dynamic:
        return False
    beside = (piece.match.root, *piece.match["op"].all_input_nodes)
    activations = [node for node in beside if node not in surroundings.constants]
    return not any(claims.is_quantized(node) or _is_integer_input(node, surroundings) for node in activations)


def _is_integer_input(node: fx.Node, surroundings: Surroundings) -> bool:
    return node.op == "placeholder" and surroundings.ends.input is not None
