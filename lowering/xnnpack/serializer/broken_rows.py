"""Rows of elementwise calls whose tables XNNPACK would free twice.

Before: an XNNPACK graph as ExecuTorch serializes it. After: the same, with a copy where a row ends badly.

When a program is loaded, XNNPACK replaces rows of elementwise calls from integers to integers by one look-up in a table
of 256 (`xnn_subgraph_fuse_unary_quantized_into_lut`). The version that ExecuTorch 1.4 has then goes on from the look-up
itself, and frees its table when it is done with a second row that begins there. There is such a row behind the tenth
call, where the first had to end; and where the look-up is added to (or multiplied by, ...) the tensor with the number
0, the delegate's first input, because the look-up's second operand is mistaken for a second result, of that number.
Found in the wheel's machine code and with an allocator that records frees. A copy is no elementwise call.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from quantplug.lowering.xnnpack.serializer.graph import insert_slice, operands, tensor

# Calls that one row can have.
_LONGEST = 10


@dataclass(frozen=True)
class _Row:
    """The calls that lead to a value, and the values that they read and write."""

    values: frozenset[int]
    calls: int = 0

    def then(self, *values: int) -> "_Row":
        """Returns the row with one more call."""
        return _Row(self.values.union(values), self.calls + 1)


def break_chains(xnn_graph: Any) -> None:
    """Puts copies into a complete graph, so that no row of elementwise calls goes on behind its table."""
    readers = Counter(value for call in xnn_graph.xnodes for value in operands(call.xnode_union))
    rows: dict[int, _Row] = {}
    for call in list(xnn_graph.xnodes):
        kernel = call.xnode_union
        read = operands(kernel)
        if not _is_elementwise(kernel):
            continue
        found = [(rows.get(value) if readers[value] == 1 else None) or _Row(frozenset((value,))) for value in read]
        row, value = max(zip(found, read, strict=True), key=lambda pair: pair[0].calls)
        others = [other for other in read if other not in row.values]
        goes_on = all(_is_number(xnn_graph, other) for other in others)
        seems_to = any(tensor(xnn_graph, other).external_id == 0 for other in others)
        if row.calls >= (_LONGEST if goes_on else 1) and (goes_on or seems_to):
            row = _Row(frozenset((_copied_before(xnn_graph, call, value),)))
        if goes_on and (row.calls or _is_integer(xnn_graph, value)):
            rows[kernel.output_id] = row.then(*others, kernel.output_id)


def _is_elementwise(kernel: Any) -> bool:
    from executorch.backends.xnnpack.serialization import xnnpack_graph_schema as schema

    likely = (schema.XNNNode1x1, schema.XNNNode2x1, schema.XNNELU, schema.XNNLeakyReLU)
    others = (schema.XNNSoftmax, schema.XNNGlobalAvgPooling2d, schema.XNNCopy, schema.XNNBatchMatrixMultiply)
    return isinstance(kernel, likely) and not isinstance(kernel, (*others, schema.XNNPReLU))


def _is_number(xnn_graph: Any, value: int) -> bool:
    """Tells whether a value is a constant of one element, which XNNPACK takes for a part of the call."""
    found = tensor(xnn_graph, value)
    return found.constant_buffer_idx != 0 and set(found.dims) <= {1}


def _is_integer(xnn_graph: Any, value: int) -> bool:
    return tensor(xnn_graph, value).datatype.name in ("xnn_datatype_qint8", "xnn_datatype_quint8")


def _copied_before(xnn_graph: Any, call: Any, value: int) -> int:
    """Lets a call read a copy of a value; returns the copy's number."""
    index = next(index for index, other in enumerate(xnn_graph.xnodes) if other is call)
    whole = [0] * len(tensor(xnn_graph, value).dims)
    copied = insert_slice(xnn_graph, index, value, whole, call.debug_handle)
    for name, operand in vars(call.xnode_union).items():
        if operand == value and name.endswith("_id") and not name.startswith("output"):
            setattr(call.xnode_union, name, copied)
    return copied
