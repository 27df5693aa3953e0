"""XNNPACK graphs as ExecuTorch serializes them, and what its optimizer would get wrong in them.

Before: a complete graph. After: the same, with a copy where a row of elementwise calls ends badly, and with calls that
nothing reads where the number of calls would otherwise be one at which the runtime corrupts its memory.

When a program is loaded, XNNPACK replaces rows of elementwise calls from integers to integers by one look-up in a table
of 256 (`xnn_subgraph_fuse_unary_quantized_into_lut`). The version that ExecuTorch 1.4 has then goes on from the look-up
itself, and frees its table when it is done with a second row that begins there. There is such a row behind the tenth
call, where the first had to end; and where the look-up is added to (or multiplied by, ...) the tensor with the number
0, the delegate's first input, because the look-up's second operand is mistaken for a second result, of that number.
Found in the wheel's machine code and with an allocator that records frees. A copy is no elementwise call.

While XNNPACK merges reshapes it appends a call and then reads another one through a pointer from before; if the array
of calls was full, it has moved. Such a program crashes when it is loaded, or much later. Source:
issues.chromium.org/issues/492450480, mended in XNNPACK after the version that ExecuTorch 1.4 has.
"""

import copy
from collections import Counter
from dataclasses import dataclass
from typing import Any

# Calls that one row can have.
_LONGEST = 10
# Calls that the array must be able to take beyond those of the graph; the optimizer appends them one by one.
_ROOM = 4


def operands(kernel: Any) -> list[int]:
    """Returns the numbers of the values that a kernel reads."""
    return [value for name, value in vars(kernel).items() if name.endswith("_id") and not name.startswith("output")]


def tensor(xnn_graph: Any, value: int) -> Any:
    """Returns the tensor behind the number of a value."""
    return _tensor(xnn_graph.xvalues[value])


def insert_slice(xnn_graph: Any, index: int, source: int, sizes: list[int], handle: int) -> int:
    """Inserts the slice of a value's first elements as a call; returns the number of the result.

    Args:
        xnn_graph: the graph.
        index: position of the new call.
        source: number of the value.
        sizes: elements along each dimension, 0 for all.
        handle: the call's debug handle.
    """
    from executorch.backends.xnnpack.serialization.xnnpack_graph_schema import XNNStaticSlice, XNode
    from executorch.backends.xnnpack.utils.xnnpack_constants import XNN_INVALID_VALUE_ID

    held = copy.deepcopy(xnn_graph.xvalues[source])
    result = _tensor(held)
    result.dims = [size or whole for size, whole in zip(sizes, result.dims, strict=True)]
    result.id_out, result.external_id, result.flags = len(xnn_graph.xvalues), XNN_INVALID_VALUE_ID, 0
    xnn_graph.xvalues.append(held)
    cut = XNNStaticSlice(len(sizes), [0] * len(sizes), sizes, source, result.id_out, 0)
    xnn_graph.xnodes.insert(index, XNode(cut, handle))
    return int(result.id_out)


def _tensor(value: Any) -> Any:
    union = value.xvalue_union
    return getattr(union, "tensor_value", union)


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


def make_room(xnn_graph: Any) -> None:
    """Appends calls to a complete graph until its array of calls has room for those of the optimizer.

    They are slices of one element, which are cheap whatever the size of their input.
    """
    calls = xnn_graph.xnodes
    source = _smallest_input(xnn_graph)
    while source is not None and capacity(len(calls)) - len(calls) < _ROOM:
        insert_slice(xnn_graph, len(calls), source.id_out, [1] * len(source.dims), calls[-1].debug_handle)


def capacity(calls: int) -> int:
    """Returns the size of XNNPACK's array after a number of calls: it doubles, from 64 on, by at most 512."""
    size = 0
    while size < calls:
        size = max(min(2 * size, size + 512), size + 64)
    return size


def _smallest_input(xnn_graph: Any) -> Any:
    inputs = [tensor(xnn_graph, index) for index in xnn_graph.input_ids]
    return min((found for found in inputs if found.dims), key=lambda found: len(found.dims), default=None)
