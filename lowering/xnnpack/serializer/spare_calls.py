"""Delegates whose number of kernel calls XNNPACK's optimizer can handle.

Before: an XNNPACK graph as ExecuTorch serializes it. After: the same, with calls that nothing reads where their number
would otherwise be one at which the runtime corrupts its memory. While XNNPACK merges reshapes it appends a call and
then reads another one through a pointer from before; if the array of calls was full, it has moved. Such a program
crashes when it is loaded, or much later. Source: issues.chromium.org/issues/492450480, mended in XNNPACK after the
version that ExecuTorch 1.4 has.
"""

from typing import Any

from quantplug.lowering.xnnpack.serializer.graph import insert_slice, tensor

# Calls that the array must be able to take beyond those of the graph; the optimizer appends them one by one.
_ROOM = 4


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
