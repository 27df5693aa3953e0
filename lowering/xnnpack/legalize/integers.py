"""Integers as XNNPACK has them: signed, one dequantize for each reader, numbers as constants.

Before: a q/dq graph with unsigned integers, shared dequantizes and numbers beside tensors. After: the same reals.
"""

from typing import Any

import torch
from torch import fx

from quantplug.core.graph.editing import add_constant, call_like, like
from quantplug.core.graph.facts import operands, operator_name, rank
from quantplug.core.qdq.nodes import is_dequantize, is_quantize
from quantplug.core.qdq.qparams import INT8, quantized_output, static_qparams
from quantplug.lowering.xnnpack.legalize.operators import after_activation, calls

_ATEN = torch.ops.aten
_Q = torch.ops.quantized_decomposed


def signed_integers(working: fx.GraphModule) -> None:
    """Quint8 inside the graph becomes qint8 with a zero point 128 lower: the same reals, XNNPACK's dtype."""
    for node in list(working.graph.nodes):
        params = static_qparams(node)
        if params is None or not is_quantize(node) or params.dtype != torch.uint8:
            continue
        if not all(static_qparams(user) == params for user in node.users):
            continue  # the integers themselves leave the graph
        signed = (params.scale, params.zero_point - 128, params.quant_min - 128, params.quant_max - 128, torch.int8)
        for conversion in (node, *node.users):
            conversion.args = (conversion.args[0], *signed)


def one_dequantize_per_use(working: fx.GraphModule) -> None:
    """A dequantize that integer and float operators share would be written for one of them only.

    Every operator that looks quantized gets its own; the others keep one between them, so that the
    conversion is carried out once.
    """
    for node in [n for n in working.graph.nodes if is_dequantize(n)]:
        users = sorted(node.users, key=lambda user: quantized_output(after_activation(user)) is not None)
        shared = [user for user in users if quantized_output(after_activation(user)) is None]
        for user in users[max(1, len(shared)) :]:
            with working.graph.inserting_before(node.next):
                own = like(working.graph.node_copy(node), node)
            user.replace_input_with(node, own)


def quantize_scalars(working: fx.GraphModule) -> None:
    """A number beside a quantized operand becomes an int8 constant that stands for exactly that number."""
    kinds: dict[str, Any] = {
        "aten::add": _ATEN.add.Tensor, "aten::sub": _ATEN.sub.Tensor, "aten::mul": _ATEN.mul.Tensor,
    }  # fmt: skip
    for node in calls(working, (*kinds, "aten::div")):
        values = operands(node)
        number, value = values.get("other"), values.get("self")
        if isinstance(number, fx.Node) or not isinstance(number, (int, float)) or isinstance(number, bool):
            continue
        if not is_dequantize(value) or quantized_output(after_activation(node)) is None or values.get("alpha", 1) != 1:
            continue
        if operator_name(node) == "aten::div" and (values.get("rounding_mode") or not number):
            continue
        number = 1.0 / number if operator_name(node) == "aten::div" else float(number)
        with working.graph.inserting_before(node):
            constant = _int8_number(working, node, number)
        node.target = kinds.get(operator_name(node), _ATEN.mul.Tensor)
        node.args, node.kwargs = (value, constant), {}


def _int8_number(working: fx.GraphModule, model: fx.Node, number: float) -> fx.Node:
    # 127 steps of |number|/127 are the number itself, up to one rounding of the scale.
    scale = abs(number) / 127 or 1.0
    # Of the other operand's rank: ExecuTorch's layout pass turns 4-D operands back beside any other.
    shape = [1] * (rank(model) or 1)
    integer = torch.full(shape, 0 if number == 0 else 127 if number > 0 else -127, dtype=torch.int8)
    held = add_constant(working, working.graph, integer, "number")
    return call_like(working.graph, model, _Q.dequantize_per_tensor.default, held, scale, 0, *INT8)
