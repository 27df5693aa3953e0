"""Delegates whose number of kernel calls XNNPACK's optimizer can handle.

Before: an XNNPACK graph as ExecuTorch serializes it. After: the same, with calls that nothing reads where their number
would otherwise be one at which the runtime corrupts its memory. While XNNPACK merges reshapes it appends a call and
then reads another one through a pointer from before; if the array of calls was full, it has moved. Such a program
crashes when it is loaded, or much later. Source: issues.chromium.org/issues/492450480, mended in XNNPACK after the
version that ExecuTorch 1.4 has.
"""

import copy
from typing import Any

# Calls that the array must be able to take beyond those of the graph; the optimizer appends them one by one.
_ROOM = 4


def make_room(xnn_graph: Any) -> None:
    """Appends calls to a complete graph until its array of calls has room for those of the optimizer."""
    source = _smallest_input(xnn_graph)
    while source is not None and capacity(len(xnn_graph.xnodes)) - len(xnn_graph.xnodes) < _ROOM:
        _append_unread(xnn_graph, source)


def capacity(calls: int) -> int:
    """Returns the size of XNNPACK's array after a number of calls: it doubles, from 64 on, by at most 512."""
    size = 0
    while size < calls:
        size = max(min(2 * size, size + 512), size + 64)
    return size


def _smallest_input(xnn_graph: Any) -> Any:
    inputs = [_tensor(xnn_graph.xvalues[index]) for index in xnn_graph.input_ids]
    return min((tensor for tensor in inputs if tensor.dims), key=lambda tensor: len(tensor.dims), default=None)


def _append_unread(xnn_graph: Any, source: Any) -> None:
    """Appends a slice of one element, which is cheap whatever the size of its input."""
    from executorch.backends.xnnpack.serialization.xnnpack_graph_schema import XNNStaticSlice, XNode
    from executorch.backends.xnnpack.utils.xnnpack_constants import XNN_INVALID_VALUE_ID

    held = copy.deepcopy(xnn_graph.xvalues[source.id_out])
    element = _tensor(held)
    element.dims = [1] * len(source.dims)
    element.id_out, element.external_id, element.flags = len(xnn_graph.xvalues), XNN_INVALID_VALUE_ID, 0
    xnn_graph.xvalues.append(held)
    zeros = [0] * len(source.dims)
    cut = XNNStaticSlice(len(zeros), zeros, list(element.dims), source.id_out, element.id_out, 0)
    xnn_graph.xnodes.append(XNode(cut, xnn_graph.xnodes[-1].debug_handle))


def _tensor(value: Any) -> Any:
    union = value.xvalue_union
    return getattr(union, "tensor_value", union)
