"""as_strided, which reads memory rather than a tensor, as the exported program would.

Before: `as_strided(y, sizes, strides, offset)`, whose result depends on how `y` lies in memory. Kernels write their
results in a layout of their own: behind a transposition the same numbers came back in another order. After: the
operator reads one row of numbers, in the order in which export saw them.
"""

import sys
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.errors import LoweringError
from quantplug.core.graph.facts import describe, is_written, tensor_value
from quantplug.core.peers.torch_names import OpOverload

_AS_STRIDED = torch.ops.aten.as_strided.default
_END = sys.maxsize


def read_strides_as_exported(graph: fx.Graph) -> None:
    """Writes every `as_strided` of a graph so that it does not depend on its operand's layout, in place.

    Raises:
        LoweringError: it reads memory that is none of its operand's, or whose layout is not known.
    """
    for node in graph.find_nodes(op="call_function", target=_AS_STRIDED):
        source = node.args[0]
        value = tensor_value(source)
        order = None if value is None else _order(value)
        # What is read in another order is a copy, into which nothing may write.
        if value is None or order is None or (order != sorted(order) and is_written(node)):
            raise LoweringError(
                f"{describe(node)} reads memory whose layout the graph of {describe(source)} does not fix; take the "
                "part that it reads by slices, `unfold` or `reshape`."
            )
        given, strides, offset = (*node.args[1:], None)[:3]
        begin = 0 if offset is None else offset - value.storage_offset()
        if _is_static(*given, *strides, value.numel()):
            last = begin + sum((size - 1) * stride for size, stride in zip(given, strides, strict=True))
            if not 0 <= begin <= last < value.numel():
                raise LoweringError(
                    f"{describe(node)} reads numbers {begin} to {last} of {describe(source)}, which has "
                    f"{value.numel()}: the others are another tensor's; take them from that one."
                )
        with graph.inserting_before(node):
            flat = source
            if order != sorted(order):
                flat = _call(graph, torch.ops.aten.permute.default, flat, order)
            flat = _call(graph, torch.ops.aten.reshape.default, flat, [-1])
            if begin:
                flat = _call(graph, torch.ops.aten.slice.Tensor, flat, 0, begin, _END)
        # Without an offset it begins where the operand does.
        node.args = (flat, given, strides)


def _is_static(*numbers: object) -> bool:
    return all(isinstance(number, int) for number in numbers)


def _order(value: Tensor) -> list[int] | None:
    """Returns the dimensions from the longest stride to the shortest, or None if the tensor is not dense."""
    axes = list(range(value.dim()))
    if value.is_contiguous() or not _is_static(*value.shape, *value.stride()):
        return axes if value.is_contiguous() else None
    strides = value.stride()
    order = sorted(axes, key=lambda axis: (-strides[axis], axis))
    return order if value.permute(order).is_contiguous() else None


def _call(graph: fx.Graph, target: OpOverload, source: fx.Node, *rest: Any) -> fx.Node:
    node = graph.call_function(target, (source, *rest))
    node.meta["val"] = target(source.meta["val"], *rest)
    return node
