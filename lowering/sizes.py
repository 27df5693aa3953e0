"""Sizes written out: one number stands for all dimensions in ATen's schemas, which passes take for one dimension.

Before: `conv2d(x, w, stride=[1])`. After: `conv2d(x, w, stride=[1, 1])`.
"""

from torch import fx

from quantplug.core.graph.editing import set_operand
from quantplug.core.graph.facts import compute_nodes, operands
from quantplug.core.graph.traits import per_dimension
from quantplug.core.peers.torch_names import OpOverload, schema_of


def write_sizes_out(graph: fx.Graph) -> None:
    """Gives a number for each dimension where a graph has one for all of them, in place."""
    for node in compute_nodes(graph):
        if isinstance(node.target, OpOverload):
            _write_out(node, node.target)


def _write_out(node: fx.Node, operator: OpOverload) -> None:
    given = operands(node)
    for argument in schema_of(operator).arguments:
        value, count = given.get(argument.name), getattr(argument, "N", None)
        if count and isinstance(value, list) and len(value) == 1:
            set_operand(node, argument.name, per_dimension(value, count))
