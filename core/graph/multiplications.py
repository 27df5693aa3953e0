"""How much a model computes, and which share of it one operator does.

Before: an exported graph. After: numbers of multiplications, read off the shapes; open sizes count as in the example
inputs.
"""

import math
from collections.abc import Callable
from typing import Any

from torch import fx

from quantplug.core.graph.facts import likely_sizes, operands, tensor_value
from quantplug.core.graph.operators import operator_overloads


def multiplications(node: fx.Node) -> int:
    """Returns how many numbers an operator multiplies and adds up; 0 for anything but products."""
    count = _COUNTS.get(node.target)
    return 0 if count is None or tensor_value(node) is None else count(node, operands(node))


def shares(graph: fx.Graph) -> dict[fx.Node, float]:
    """Returns which share of a graph's multiplications each product does."""
    counts = {node: multiplications(node) for node in graph.nodes if node.op == "call_function"}
    total = max(sum(counts.values()), 1)
    return {node: count / total for node, count in counts.items() if count}


def _by_weight(node: fx.Node, given: dict[str, Any]) -> int:
    """Each output is the sum over one filter, or of a transposed convolution each input goes into one."""
    weight, is_transposed = likely_sizes(given["weight"]), "transpose" in str(node.target) or given.get("transposed")
    written = likely_sizes(given["input"] if is_transposed else node)
    return math.prod(written) * math.prod(weight[1:])


def _by_matrix(node: fx.Node, given: dict[str, Any]) -> int:
    names = ("mat1", "batch1", "self")
    first = next(given[name] for name in names if name in given)
    return math.prod(likely_sizes(node)) * likely_sizes(first)[-1]


def _by_attention(node: fx.Node, given: dict[str, Any]) -> int:
    return 2 * math.prod(likely_sizes(given["query"])) * likely_sizes(given["key"])[-2]


_COUNTS: dict[Any, Callable[[fx.Node, dict[str, Any]], int]] = {
    overload: count
    for count, names in (
        (_by_weight, ("linear", "convolution", *(f"conv{n}d" for n in (1, 2, 3)))),
        (_by_weight, ("conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input")),
        (_by_matrix, ("mm", "addmm", "bmm", "baddbmm", "matmul")),
        (_by_attention, ("scaled_dot_product_attention",)),
    )
    for name in names
    for overload in operator_overloads(name)
}
