"""Graphs of mixed precision, computed in one float type between their ends.

Before: a q/dq graph whose float tensors are float16 or bfloat16, or a float graph whose weights are stored in float16.
After: the first in float32, since ExecuTorch 1.4's serializer writes programs for mixed half and integer graphs that
compute NaN or write outside their memory; the second in float16, since XNNPACK has no product of float32 inputs with
a weight in float16. Inputs are cast where they enter and outputs where they leave.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.graph.constants import written_buffers
from quantplug.core.graph.editing import call_like, constant
from quantplug.core.graph.facts import attribute, compute_nodes, constant_value, tensor_value
from quantplug.core.peers.torch_names import pytree
from quantplug.core.qdq.nodes import is_dequantize, is_quantize
from quantplug.lowering.halves import widening_casts
from quantplug.lowering.starting import state_of

_ATEN = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_LIMIT = torch.finfo(torch.float16).max
COMPUTED = "it computes in float16"


def compute_in_float32(working: fx.GraphModule, expected: Any) -> None:
    """Widens a quantized half-precision graph in place; a graph without either is left alone.

    Args:
        working: a private copy of the q/dq graph.
        expected: what the graph returns, whose dtypes are kept.
    """
    if _has_integers(working.graph) and any(map(_mentions_half, working.graph.nodes)):
        _recast(working, expected, _HALF, torch.float32)


def compute_in_float16(working: fx.GraphModule, expected: Any) -> dict[str, str]:
    """Narrows a graph that stores weights in float16, in place.

    Weights are widened for good where other numbers of the program have to be of another type: beside integers, and
    beside a state, which is the caller's.

    Args:
        working: a private copy of the q/dq graph.
        expected: what the graph returns, whose dtypes are kept.

    Returns:
        What the report says of operators, by name.
    """
    casts = widening_casts(working.graph)
    written = (attribute(working, path) for path in written_buffers(working.graph))
    reason = ""
    if _has_integers(working.graph):
        reason = "beside integers XNNPACK computes floats in float32, and so this weight is stored"
    elif any(buffer.is_floating_point() for buffer in written):
        reason = "beside a state in float32 it computes in float32, and so its weight is stored"
    if reason:
        told = {user.name: reason for node in casts for user in node.users}
        for node in casts:
            _replace_constant(working, node, node.args[0], torch.float32)
        return told
    if not casts:
        return {}
    for node in casts:
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        working.graph.erase_node(node)
    _recast(working, expected, (torch.float32,), torch.float16)
    return {node.name: COMPUTED for node in compute_nodes(working.graph)}


def _has_integers(graph: fx.Graph) -> bool:
    return any(is_quantize(node) or is_dequantize(node) for node in graph.nodes)


def _recast(working: fx.GraphModule, expected: Any, types: Collection[torch.dtype], wanted: torch.dtype) -> None:
    def other(part: Any) -> Any:
        if wanted == torch.float16 and isinstance(part, float) and _LIMIT < abs(part) < float("inf"):
            return _LIMIT if part > 0 else -_LIMIT  # what masks are filled with
        return wanted if part in types else part

    _recast_state(working, types, wanted)
    for node in list(working.graph.nodes):
        if node.op == "call_function" and "val" in node.meta:  # by which what is written later knows the type
            node.meta["val"] = pytree.tree_map(lambda v: v.to(wanted) if _is_of(v, types) else v, node.meta["val"])
        if node.op == "call_function":
            node.args, node.kwargs = (pytree.tree_map(other, part) for part in (node.args, node.kwargs))
        elif node.op == "placeholder" and _is_of(tensor_value(node), types):
            with working.graph.inserting_before(node.next):
                cast = call_like(working.graph, node, _ATEN.to.dtype, node, wanted)
            node.replace_all_uses_with(cast, delete_user_cb=lambda user, own=cast: user is not own)
        elif node.op == "get_attr" and _is_of(constant_value(node), types):
            _replace_constant(working, node, node, wanted)
    _cast_outputs(working, expected, types)
    working.graph.lint()
    working.recompile()


def _recast_state(working: fx.GraphModule, types: Collection[torch.dtype], wanted: torch.dtype) -> None:
    """Lets a graph keep its own state in another type, as what it asserts of types says then."""
    recast: dict[int, Tensor] = {}  # by the tensor, which may have two names
    for path, buffer in state_of(working).items():
        if buffer.dtype in types:
            place, _, leaf = path.rpartition(".")
            owner = attribute(working, place) if place else working
            setattr(owner, leaf, recast.setdefault(id(buffer), buffer.to(wanted)))


def _mentions_half(node: fx.Node) -> bool:
    value = constant_value(node) if node.op == "get_attr" else tensor_value(node)
    return _is_of(value, _HALF) or any(part in _HALF for part in pytree.tree_leaves((node.args, node.kwargs)))


def _is_of(value: Any, types: Collection[torch.dtype]) -> bool:
    return isinstance(value, Tensor) and value.dtype in types


def _replace_constant(working: fx.GraphModule, node: fx.Node, source: Any, dtype: torch.dtype) -> None:
    """Lets the readers of a node read a constant in another type; finite numbers stay finite."""
    value = constant_value(source)
    if value is None:
        return
    if dtype == torch.float16:
        value = torch.where(value.isfinite(), value.clamp(-_LIMIT, _LIMIT), value)
    node.replace_all_uses_with(constant(node, "cast", value.detach().to(dtype)))
    working.graph.erase_node(node)


def _cast_outputs(working: fx.GraphModule, expected: Any, types: Collection[torch.dtype]) -> None:
    output = working.graph.output_node()
    values, structure = pytree.tree_flatten(output.args[0])
    wanted = [leaf.dtype if isinstance(leaf, Tensor) else None for leaf in pytree.tree_leaves(expected)]
    cast = []
    for value, dtype in zip(values, wanted, strict=True):
        if dtype in types and isinstance(value, fx.Node):
            with working.graph.inserting_before(output):
                value = call_like(working.graph, value, _ATEN.to.dtype, value, dtype)  # noqa: PLW2901
        cast.append(value)
    output.args = (pytree.tree_unflatten(cast, structure),)
