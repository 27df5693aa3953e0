"""XNNPACK graphs as ExecuTorch serializes them: what their calls read, their tensors, and further slices."""

import copy
from typing import Any


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
