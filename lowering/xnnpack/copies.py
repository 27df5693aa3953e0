"""Copies that only export needs, dropped from the edge program before it is partitioned.

Before: `dequantize -> copy -> view`, as export writes a reshape of a turned tensor. After: `dequantize -> view`, which
takes integers. Tensors of the edge program are all contiguous, so that the copy says nothing there.
"""

from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from quantplug.core.graph.facts import operator_name
from quantplug.core.qdq.nodes import is_dequantize

_COPIES = {"aten::clone", "dim_order_ops::_clone_dim_order"}


def copies_of_dequantized_are_dropped(edge: fx.GraphModule) -> PassResult:
    """Lets what reads a copy of a dequantized tensor read the tensor: nobody else has a name for its memory."""
    copies = [node for node in edge.graph.nodes if operator_name(node) in _COPIES and _says_nothing(node)]
    for node in copies:
        node.replace_all_uses_with(node.args[0])
        edge.graph.erase_node(node)
    edge.recompile()
    return PassResult(edge, bool(copies))


def _says_nothing(copy: fx.Node) -> bool:
    source = copy.args[0]
    return is_dequantize(source) and source.meta["val"].dim_order() == copy.meta["val"].dim_order()
