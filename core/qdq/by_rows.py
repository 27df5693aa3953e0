"""Weights quantized and dequantized a few rows at a time.

Before: a quantize or dequantize node and the tensors that it reads. After: what it yields. Its operator computes
several tensors of floats on the way, each as large as a whole head or table of a language model; here of a few rows.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from quantplug.core.graph.constants import computed
from quantplug.core.graph.facts import operands, operator_name
from quantplug.core.qdq.nodes import is_dequantize, is_quantize

# Elements at a time: 1 MB of float32 stays in the caches.
_SLAB = 2**18
# Look-ups in tables that stay integers.
ROWS_OF_INTEGERS = ("quantized_decomposed::embedding_byte", "quantized_decomposed::embedding_4bit")


def computed_by_rows(node: fx.Node, value_of: Callable[[fx.Node], Any]) -> Any:
    """Returns what a node yields where the nodes that it reads have these values; as `computed`, bit by bit."""
    if operator_name(node) in ROWS_OF_INTEGERS:
        return _looked_up(node, value_of)
    given: Any = node.args[0]
    whole = value_of(given) if has_rows_apart(node) else None
    if not isinstance(whole, Tensor) or whole.dim() < 2 or whole.numel() <= _SLAB:
        return computed(node, value_of)
    found: Tensor | None = None
    start = 0
    for rows in in_rows(node, value_of):
        found = rows.new_empty(whole.shape) if found is None else found
        found[start : start + len(rows)] = rows
        start += len(rows)
    return found


def in_rows(node: fx.Node, value_of: Callable[[fx.Node], Any]) -> Iterator[Tensor]:
    """Yields what a node of rows apart yields, a megabyte after the other."""
    given: Any = node.args[0]
    target: Any = node.target
    whole = value_of(given)
    step = max(1, _SLAB // whole[:1].numel())
    for start in range(0, len(whole), step):
        few: Any = map_arg((node.args, node.kwargs), partial(_rows, value_of, start, step))
        yield target(*few[0], **few[1])


def _looked_up(node: fx.Node, value_of: Callable[[fx.Node], Any]) -> Any:
    """Returns rows of a table of integers; the operator makes floats of the whole table first."""
    target: Any = node.target
    read: Any = map_arg((node.args, node.kwargs), value_of)
    (*numbers, low, high, indices), kwargs = read
    wanted = indices.reshape(-1)
    few = (value[wanted] if isinstance(value, Tensor) else value for value in numbers)
    return target(*few, low, high, torch.arange(len(wanted)).reshape(indices.shape), **kwargs)


def _rows(value_of: Callable[[fx.Node], Any], start: int, step: int, source: fx.Node) -> Any:
    value = value_of(source)
    return value[start : start + step] if isinstance(value, Tensor) and value.dim() else value


def has_rows_apart(node: fx.Node) -> bool:
    """Tells whether each row has scales of its own, so that all tensors that are read have as many rows."""
    if operator_name(node) in ROWS_OF_INTEGERS:
        return True
    if not (is_quantize(node) or is_dequantize(node)):
        return False
    given: Any = operands(node)
    block = given.get("block_size")
    return given.get("axis") == 0 if block is None else block[0] == 1 and len(block) == 2
