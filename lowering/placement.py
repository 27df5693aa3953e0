"""Where each operator of the q/dq graph ended up.

Before: a cleaned q/dq graph is recorded; after the rules the lowered graph is compared with the record.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import torch
from torch import fx

from quantplug.core.graph.facts import compute_nodes, module_path
from quantplug.core.graph.meta import HOW, ORIGINS, REASON, origins
from quantplug.core.qdq.nodes import is_qdq
from quantplug.core.specs.decision import decision
from quantplug.lowering.program import LoweredOp

INTEGERS = (torch.uint8, torch.int8)
# An operator is int8 because a kernel was recorded, never because nothing else was.
NOTHING = "no kernel of it is left: at inference it computes nothing"
ONCE = "it is the same at every call, and computed once"


def record(graph: fx.Graph) -> tuple[LoweredOp, ...]:
    """Marks every compute operator with its own name and returns them all as not yet placed.

    Those that annotation decided to leave float have their reason from there.
    """
    found = [node for node in compute_nodes(graph) if not is_qdq(node)]
    for node in found:
        ORIGINS.put(node, frozenset({node.name}))
    return tuple(LoweredOp(n.name, str(n.target), module_path(n), "float", _decided(n)) for n in found)


def _decided(node: fx.Node) -> str:
    decided = decision(node)
    return "" if decided is None else decided.why


def place(
    recorded: tuple[LoweredOp, ...], graph: fx.Graph, libraries: Collection[str] = (), folded: Iterable[str] = ()
) -> tuple[LoweredOp, ...]:
    """Returns the recorded operators with their placement in a lowered graph: int8 where a kernel of it is left.

    An operator that was decided float and that a kernel of others takes along, such as a sum behind a product, is
    computed there in float. So it has the reason of the decision; a kernel of integers for it alone would be told.

    Args:
        recorded: what `record` returned.
        graph: the graph that the rules left.
        libraries: the namespaces of the target's kernels; operators on integer tensors count in any case.
        folded: names of operators that became constants.
    """
    carriers: dict[str, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        for name in origins(node):
            carriers[name].append(node)
    floats = frozenset(operator.node for operator in recorded if operator.reason)
    once = frozenset(folded)
    return tuple(_placed(operator, carriers, libraries, floats, once) for operator in recorded)


def _placed(
    operator: LoweredOp,
    carriers: Mapping[str, list[fx.Node]],
    libraries: Collection[str],
    floats: frozenset[str],
    once: frozenset[str],
) -> LoweredOp:
    if operator.node in once:
        return replace(operator, reason=operator.reason or ONCE, how=ONCE)
    # Conversions to and from integers are no kernels, unless they are all that is left of it.
    found = carriers.get(operator.node, [])
    kernels = [node for node in found if not is_qdq(node)] or found
    own = [node for node in kernels if origins(node) <= floats] if operator.reason else kernels
    if any(_is_integer(node, libraries) for node in own):
        return replace(operator, placement="int8", reason="")
    how = HOW.get(kernels[-1], "") if kernels else ""
    return replace(operator, reason=operator.reason or _reason(kernels), how=how)


def _reason(kernels: list[fx.Node]) -> str:
    """Returns why none of the nodes that carry an operator out is an integer kernel."""
    return (REASON.get(kernels[-1]) or _no_rule(kernels[-1])) if kernels else NOTHING


def _is_integer(node: fx.Node, libraries: Collection[str]) -> bool:
    if getattr(node.target, "namespace", None) in libraries:
        return True
    return any(getattr(n.meta.get("val"), "dtype", None) in INTEGERS for n in (node, *node.all_input_nodes))


def _no_rule(node: fx.Node) -> str:
    return f"no integer kernel for {node.target} in this place"
