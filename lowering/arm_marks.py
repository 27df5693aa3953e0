"""What ExecuTorch's passes for Arm ask of a q/dq graph: a mark on every operator that is quantized.

Before: a graph whose nodes know what annotation decided. After: those that compute on integers alone have the mark that
Arm's own quantizers leave; the passes fold quantization into no others.
"""

import logging
from collections.abc import Iterator, Set
from contextlib import contextmanager

from torch import fx

from quantplug.core.graph.facts import compute_nodes, is_constant, is_float
from quantplug.core.graph.operators import CLAMPS, overloads_of
from quantplug.core.qdq.nodes import is_qdq, is_quantize
from quantplug.core.specs.decision import decision

_CLAMPS = overloads_of(CLAMPS)


def mark_quantized(graph: fx.Graph) -> None:
    """Marks the operators that our rules took, in place."""
    from executorch.backends.arm.common.annotation_meta import ArmAnnotationInfo

    for node in _quantized(graph):
        node.meta["custom"] = {**node.meta.get("custom", {}), ArmAnnotationInfo.CUSTOM_META_KEY: {"quantized": True}}


def _quantized(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yields the operators of our rules, without those that read a state which stays float while it is written.

    Where others quantized, which leave no decision, those count between whose q/dq pairs nothing else stands.
    """
    integers: set[fx.Node] = set()
    enclosed = _enclosed(graph)
    for node in compute_nodes(graph):
        decided = decision(node)
        is_taken = node in enclosed if decided is None else decided.quantized
        if is_qdq(node):
            integers.add(node)
        elif is_taken and all(_is_of_integers(operand, integers) for operand in node.all_input_nodes):
            integers.add(node)
            yield node


def _is_of_integers(operand: fx.Node, integers: Set[fx.Node]) -> bool:
    return operand in integers or is_constant(operand) or not is_float(operand)


def _enclosed(graph: fx.Graph) -> set[fx.Node]:
    """Returns the undecided operators whose result is quantized at once, or bounded and then quantized."""
    found: set[fx.Node] = set()
    for node in reversed(list(compute_nodes(graph))):
        if decision(node) is None and node.users and all(_ends(user, found) for user in node.users):
            found.add(node)
    return found


def _ends(user: fx.Node, enclosed: Set[fx.Node]) -> bool:
    return is_quantize(user) or (user in enclosed and user.target in _CLAMPS)


@contextmanager
def quiet() -> Iterator[None]:
    """The passes log a warning for every operator that they leave to others, and traces of what they raise."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)
