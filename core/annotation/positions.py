"""Positions and angles, whose values 8 bits do not hold: a step of a few positions is a turn in `sin` and `cos`.

Before: an exported graph. After: its positions (integers turned into floats, such as the places in a sequence, and
what moves or scales them) and its angles (what `sin` and `cos` read, behind moves, sums and products). Rotary
embeddings (Su et al. 2021) compute both at run time wherever a cache offsets them.
"""

import torch
from torch import fx

from quantplug.core.graph.facts import is_constant, is_float, tensor_value
from quantplug.core.graph.operators import IDENTITIES, JOINS, MOVES, REPEATS
from quantplug.core.patterns.language import op

# Integers of 8 bits are images, and truth values are masks.
_COUNTS = (torch.int16, torch.int32, torch.int64)
_MOVES = op(*MOVES, *REPEATS, *IDENTITIES, *JOINS, "expand_as", "to.dtype", "_to_copy", "neg").overloads
_ARITHMETIC = op("mul", "div", "add", "sub").overloads
_STEPS = _MOVES | _ARITHMETIC | op("matmul", "bmm", "mm", "linear", "addmm").overloads
_TURNS = op("sin", "cos").overloads
_RANGES = op("arange", "linspace").overloads


def positions(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes that yield positions in float. Linear in the graph."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or not is_float(node):
            continue
        read = [source for source in node.all_input_nodes if not _is_number(source)]
        carries = node.target in _MOVES | _ARITHMETIC
        if node.target in _RANGES or (read and all(_is_count(n) or (carries and n in found) for n in read)):
            found.add(node)
    return found


def angles(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes that yield angles. Linear in the graph."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.target in _TURNS or (node in found and node.target in _STEPS):
            found.update(n for n in node.all_input_nodes if n.op == "call_function" and is_float(n))
    return found


def _is_count(node: fx.Node) -> bool:
    value = tensor_value(node)
    return value is not None and value.dtype in _COUNTS and not is_constant(node)


def _is_number(node: fx.Node) -> bool:
    value = tensor_value(node)
    return is_constant(node) or (value is not None and not value.dim())
