"""What ExecuTorch's passes for Arm ask of a q/dq graph: a mark on every operator that is quantized.

Before: a graph whose nodes know what annotation decided. After: those that compute on integers alone have the mark that
Arm's own quantizers leave; the passes fold quantization into no others.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch import fx

from quantplug.core.graph.facts import compute_nodes, is_constant, is_float
from quantplug.core.qdq.nodes import is_qdq
from quantplug.core.specs.decision import decision


def mark_quantized(graph: fx.Graph) -> None:
    """Marks the operators that our rules took, in place."""
    from executorch.backends.arm.common.annotation_meta import ArmAnnotationInfo

    for node in _quantized(graph):
        node.meta["custom"] = {**node.meta.get("custom", {}), ArmAnnotationInfo.CUSTOM_META_KEY: {"quantized": True}}


def _quantized(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yields the operators of our rules, without those that read a state which stays float while it is written."""
    integers: set[fx.Node] = set()
    for node in compute_nodes(graph):
        decided = decision(node)
        if is_qdq(node):
            integers.add(node)
        elif (
            decided is not None
            and decided.quantized
            and all(
                operand in integers or is_constant(operand) or not is_float(operand) for operand in node.all_input_nodes
            )
        ):
            integers.add(node)
            yield node


@contextmanager
def quiet() -> Iterator[None]:
    """The passes log a warning for every operator that they leave to others, and traces of what they raise."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)
