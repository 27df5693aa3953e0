"""Inputs that a model writes in place, as `relu_(x)` on what it is given does.

Before: a graph whose operators may write the caller's tensors. After: they write a copy of those, so that the outputs
are the same and the inputs stay what they are. A q/dq pair is a copy as well, and an ExecuTorch program or OpenVINO's
cannot write its inputs: without this, whether the caller's tensor changes depended on what happened to be quantized,
and every second pass over the calibration data saw other numbers.
"""

import warnings

import torch
from torch import fx

from quantplug.core.errors import QuantplugWarning
from quantplug.core.graph.facts import describe, is_written, viewed_node, written_argument


def leave_inputs_as_they_are(graph: fx.Graph, stacklevel: int) -> None:
    """Lets a graph write copies of its inputs, in place, and warns the caller `stacklevel` functions above this."""
    for node in graph.find_nodes(op="placeholder"):
        if not is_written(node):
            continue
        warnings.warn(
            f"{describe(_writer(node))} writes input '{node.name}' in place: the quantized model gives the same "
            f"outputs, but leaves '{node.name}' as it is; return the new value if the caller needs it.",
            QuantplugWarning,
            stacklevel=stacklevel + 1,
        )
        last = [found for found in graph.nodes if found.op == "placeholder"][-1]
        with graph.inserting_after(last):
            copy = graph.create_node("call_function", torch.ops.aten.clone.default, (node,), name=f"{node.name}_copy")
        node.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)
        if "val" in node.meta:
            copy.meta["val"] = node.meta["val"]


def _writer(node: fx.Node) -> fx.Node:
    """Returns the first operator that writes a node's memory, or takes it into a submodel that does."""
    names = {node}
    found: fx.Node
    for found in node.graph.nodes:
        if written_argument(found) in names:
            return found
        if viewed_node(found) in names:
            names.add(found)
    return next(iter(node.users))
