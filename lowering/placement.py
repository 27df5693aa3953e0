"""Where each operator of the q/dq graph ended up.

Before: a cleaned q/dq graph is recorded; after the rules the lowered graph is compared with the record.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable

import torch
from torch import fx

from quantplug.core.graph.facts import compute_nodes, module_path
from quantplug.core.graph.meta import ORIGINS, REASON, origins
from quantplug.core.qdq.nodes import is_qdq
from quantplug.core.specs.decision import why_float
from quantplug.lowering.program import LoweredOp

INTEGERS = (torch.uint8, torch.int8)
# An operator is int8 because a kernel was recorded, never because nothing else was.
NOTHING = "no kernel of it is left: at inference it computes nothing"


def record(graph: fx.Graph) -> tuple[LoweredOp, ...]:
    """Marks every compute operator with its own name and returns them all as not yet placed.

    Those that annotation left float say why, in the words of the report.
    """
    found = [node for node in compute_nodes(graph) if not is_qdq(node)]
    for node in found:
        ORIGINS.put(node, frozenset({node.name}))
    return tuple(LoweredOp(node.name, str(node.target), module_path(node), "float", why_float(node)) for node in found)


def place(
    recorded: tuple[LoweredOp, ...], graph: fx.Graph, libraries: Collection[str] = (), folded: Iterable[str] = ()
) -> tuple[LoweredOp, ...]:
    """Returns the recorded operators with their placement in a lowered graph: int8 where a kernel of it is left.

    Args:
        recorded: what `record` returned.
        graph: the graph that the rules left.
        libraries: the namespaces of the target's kernels; operators on integer tensors count in any case.
        folded: names of operators that became constants.
    """
    once = dict.fromkeys(folded, "it is the same at every call, and computed once")
    carriers: dict[str, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        for name in origins(node):
            carriers[name].append(node)
    reasons = {found.node: _reason(carriers[found.node], libraries) for found in recorded} | once
    return tuple(_placed(operator, reasons[operator.node]) for operator in recorded)


def _reason(carriers: list[fx.Node], libraries: Collection[str]) -> str:
    """Returns why none of the nodes that carry an operator out is an integer kernel, "" where one is.

    Conversions to and from integers are none, unless they are all that is left of it.
    """
    kernels = [node for node in carriers if not is_qdq(node)] or carriers
    if any(_is_integer(node, libraries) for node in kernels):
        return ""
    return (REASON.get(kernels[-1]) or _no_rule(kernels[-1])) if kernels else NOTHING


def _placed(operator: LoweredOp, reason: str) -> LoweredOp:
    placement = "float" if reason else "int8"
    return LoweredOp(operator.node, operator.target, operator.module_path, placement, reason)


def _is_integer(node: fx.Node, libraries: Collection[str]) -> bool:
    if getattr(node.target, "namespace", None) in libraries:
        return True
    return any(getattr(n.meta.get("val"), "dtype", None) in INTEGERS for n in (node, *node.all_input_nodes))


def _no_rule(node: fx.Node) -> str:
    return f"no integer kernel for {node.target} in this place"
