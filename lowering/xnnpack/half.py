"""Quantized graphs over half-precision numbers, computed in float32 between their ends.

Before: a q/dq graph whose float tensors are float16 or bfloat16. After: the same graph in float32, its inputs
widened where they enter and its outputs narrowed where they leave. ExecuTorch's serializer writes programs for
mixed half and integer graphs that compute NaN or write outside their memory.
"""

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from quantplug.core.graph import constant_value, tensor_value
from quantplug.lowering.xnnpack.conversions import add_constant, call, is_dequantize, is_quantize

_ATEN = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


def compute_in_float32(working: fx.GraphModule, expected: Any) -> None:
    """Widens a quantized half-precision graph in place; a graph without either is left alone.

    Args:
        working: a private copy of the q/dq graph.
        expected: what the graph returns, whose dtypes are kept.
    """
    nodes = list(working.graph.nodes)
    if not any(is_quantize(n) or is_dequantize(n) for n in nodes) or not any(_mentions_half(n) for n in nodes):
        return
    for node in nodes:
        if node.op == "call_function":
            node.args, node.kwargs = (pytree.tree_map(_widened, part) for part in (node.args, node.kwargs))
        elif node.op == "placeholder" and _is_half(tensor_value(node)):
            with working.graph.inserting_before(node.next):
                wide = call(working.graph, node, _ATEN.to.dtype, node, torch.float32)
            node.replace_all_uses_with(wide, delete_user_cb=lambda user, own=wide: user is not own)
        elif node.op == "get_attr" and _is_half(constant_value(node)):
            _widen_constant(working, node)
    _narrow_outputs(working, expected)
    working.graph.lint()
    working.recompile()


def _mentions_half(node: fx.Node) -> bool:
    value = constant_value(node) if node.op == "get_attr" else tensor_value(node)
    return _is_half(value) or any(part in _HALF for part in pytree.tree_leaves((node.args, node.kwargs)))


def _is_half(value: Tensor | None) -> bool:
    return value is not None and value.dtype in _HALF


def _widened(part: Any) -> Any:
    return torch.float32 if part in _HALF else part


def _widen_constant(working: fx.GraphModule, node: fx.Node) -> None:
    value = constant_value(node)
    if value is not None:
        with working.graph.inserting_before(node):
            wide = add_constant(working, working.graph, value.detach().float(), "wide")
        node.replace_all_uses_with(wide)
        working.graph.erase_node(node)


def _narrow_outputs(working: fx.GraphModule, expected: Any) -> None:
    output = working.graph.output_node()
    values, structure = pytree.tree_flatten(output.args[0])
    wanted = [leaf.dtype if isinstance(leaf, Tensor) else None for leaf in pytree.tree_leaves(expected)]
    narrowed = []
    for value, dtype in zip(values, wanted, strict=True):
        if dtype in _HALF and isinstance(value, fx.Node):
            with working.graph.inserting_before(output):
                value = call(working.graph, value, _ATEN.to.dtype, value, dtype)  # noqa: PLW2901
        narrowed.append(value)
    output.args = (pytree.tree_unflatten(narrowed, structure),)
