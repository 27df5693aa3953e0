"""Quantize and dequantize nodes of a q/dq graph, read and written at one place.

Before: ATen nodes. After: their quantization parameters as values, and new nodes with the metadata of
the node they stand for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx, nn

from quantplug.core.graph.facts import constant_value, is_constant, operands

_Q = torch.ops.quantized_decomposed
INT8 = (-128, 127, torch.int8)


def operator_name(node: Any) -> str:
    """Returns "namespace::name" of an operator call, "" for anything else."""
    schema = getattr(node.target, "_schema", None) if isinstance(node, fx.Node) else None
    return str(schema.name) if schema is not None else ""


def is_quantize(node: Any) -> TypeGuard[fx.Node]:
    """Tells whether a node turns a float tensor into integers."""
    return operator_name(node).startswith(("quantized_decomposed::quantize_", "torchao::quantize_"))


def is_dequantize(node: Any) -> TypeGuard[fx.Node]:
    """Tells whether a node turns integers into a float tensor."""
    return operator_name(node).startswith(("quantized_decomposed::dequantize_", "torchao::dequantize_"))


def is_conversion(node: Any) -> TypeGuard[fx.Node]:
    """Tells whether a node quantizes, dequantizes or chooses quantization parameters."""
    name = operator_name(node)
    return is_quantize(node) or is_dequantize(node) or name.partition("::")[2].startswith("choose_qparams")


@dataclass(frozen=True)
class QParams:
    """Per-tensor quantization parameters of one quantize or dequantize node."""

    scale: float
    zero_point: int
    quant_min: int
    quant_max: int
    dtype: torch.dtype

    @property
    def is_int8(self) -> bool:
        """Tells whether the range is the whole of int8, the only one that XNNPACK's kernels saturate to."""
        return (self.quant_min, self.quant_max, self.dtype) == INT8

    @property
    def args(self) -> tuple[float, int, int, int, torch.dtype]:
        """The parameters as arguments of a quantize or dequantize node."""
        return (self.scale, self.zero_point, self.quant_min, self.quant_max, self.dtype)


def qparams(node: Any) -> QParams | None:
    """Returns the parameters of a static per-tensor quantize or dequantize node, None for any other node."""
    name = operator_name(node)
    if name not in ("quantized_decomposed::quantize_per_tensor", "quantized_decomposed::dequantize_per_tensor"):
        return None
    values = operands(node)
    if isinstance(values["scale"], fx.Node):  # chosen at run time
        return None
    return QParams(
        float(values["scale"]), int(values["zero_point"]), values["quant_min"], values["quant_max"], values["dtype"]
    )


def is_dynamic(node: Any) -> TypeGuard[fx.Node]:
    """Tells whether a dequantize node's parameters are chosen at run time from its own input."""
    if not is_dequantize(node):
        return False
    scale = operands(node).get("scale", operands(node).get("scales"))
    return isinstance(scale, fx.Node) and not is_constant(scale)


def sole_user(node: fx.Node) -> fx.Node | None:
    """Returns the only node that uses another one, or None if there are none or several."""
    users = list(node.users)
    return users[0] if len(users) == 1 else None


def quantized_output(node: fx.Node) -> QParams | None:
    """Returns the int8 parameters of the one quantize node that uses a node, None if there is none."""
    user = sole_user(node)
    return qparams(user) if user is not None and is_quantize(user) else None


def like(node: fx.Node, model: fx.Node) -> fx.Node:
    """Gives a new node the module path and the history of the node that it stands for."""
    for key in ("nn_module_stack", "stack_trace", "from_node", "custom"):
        if key in model.meta:
            node.meta[key] = model.meta[key]
    return node


def call(graph: fx.Graph, model: fx.Node, target: Callable[..., Any], *args: Any) -> fx.Node:
    """Creates an operator call at the graph's insertion point, with the metadata of another node."""
    return like(graph.call_function(target, args), model)


def requantize(graph: fx.Graph, value: fx.Node, params: QParams) -> fx.Node:
    """Creates a quantize and a dequantize of a value at the insertion point; returns the dequantize."""
    quantized = call(graph, value, _Q.quantize_per_tensor.default, value, *params.args)
    return call(graph, value, _Q.dequantize_per_tensor.default, quantized, *params.args)


def add_constant(owner: fx.GraphModule, graph: fx.Graph, value: Tensor, name: str) -> fx.Node:
    """Registers a parameter or buffer under a free name and creates its `get_attr` at the insertion point."""
    free, suffix = f"_quantplug_{name}", 0
    while hasattr(owner, free):
        suffix += 1
        free = f"_quantplug_{name}_{suffix}"
    if isinstance(value, nn.Parameter):
        owner.register_parameter(free, value)
    else:
        owner.register_buffer(free, value)
    return graph.get_attr(free)


def folded(node: fx.Node) -> Tensor | None:
    """Returns the value of a dequantize node over constants, None if an operand is computed at run time."""
    return _evaluated(node) if is_dequantize(node) else None


def _evaluated(node: fx.Node) -> Tensor | None:
    if node.op == "get_attr":
        return constant_value(node)
    values = {n: _evaluated(n) for n in node.all_input_nodes}
    if not operator_name(node) or not values or any(v is None for v in values.values()):
        return None
    target: Any = node.target
    result = target(*fx.node.map_arg(node.args, values.__getitem__), **fx.node.map_arg(node.kwargs, values.__getitem__))
    return result if isinstance(result, Tensor) else None
