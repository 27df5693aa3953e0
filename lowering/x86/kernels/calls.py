"""Calls of oneDNN's products: which they are, what they yield and what they end in, by the names of their operands.

All take the operands of `onednn.qlinear_pointwise` and write their output as `output_scale`, `output_zero_point` and
`output_dtype`; the function that they end in has other names in each.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from quantplug.core.graph.editing import call, set_operand
from quantplug.core.graph.facts import operands
from quantplug.core.patterns.language import Match, Op, op
from quantplug.core.qdq.qparams import QParams, qparams

CONVOLUTION, LINEAR = "onednn::qconv_pointwise", "onednn::qlinear_pointwise"
# torch.export cannot serialize an empty list of numbers; the kernels read none of it here
NO_SCALARS = [0.0]
# Bounds for a kernel's clamp that bound nothing.
UNBOUNDED = (-3.0e38, 3.0e38)
# Of the function that a kernel ends in: its name, its numbers, and which form of it.
_ENDING = (
    ("attr", "unary_attr", "post_op_name", "unary_post_op"),
    ("scalars", "unary_scalars", "post_op_args", "unary_post_op_args"),
    ("algorithm", "unary_algorithm", "post_op_algorithm", "unary_post_op_algorithm"),
)


def kernel(name: str, function: str | None = "none") -> Op:
    """Returns the pattern of a static or dynamic kernel that still yields float32.

    Args:
        name: CONVOLUTION or LINEAR.
        function: what it ends in; None for any.
    """
    pattern = op(f"{name}.default", f"{name}.tensor", name="kernel", output_dtype=torch.float32)
    return pattern if function is None else pattern.where(lambda match: _ends_in(match["kernel"], function))


def _ends_in(node: fx.Node, function: str) -> str | None:
    found, *_ = ending(operands(node))
    return None if found == function else f"the kernel already ends in {found}"


def ending(given: Mapping[str, Any]) -> tuple[str, list[Any], str]:
    """Returns the function that a kernel ends in, its numbers and its form, from the kernel's operands."""
    name, numbers, form = (next(given[one] for one in names if one in given) for names in _ENDING)
    return name, numbers, form


def end_in(node: fx.Node, *function: Any) -> None:
    """Lets a kernel end in a function: its name, its numbers, and its form where that changes."""
    given = operands(node)
    for names, found in zip(_ENDING, function, strict=False):
        set_operand(node, next(name for name in names if name in given), found)


def end_objection(node: fx.Node, function: str) -> str | None:
    """Returns why a kernel cannot end in a function other than none, or None."""
    # The kernels check the function by the number of spatial dimensions; over three they take none.
    over_volumes = len(operands(node).get("stride", ())) == 3
    return f"the convolution kernel over 3 dimensions does not end in {function}" if over_volumes else None


def output_objection(params: QParams) -> str | None:
    """Returns why no kernel quantizes its result to these parameters, or None."""
    is_byte = params.is_static and params.dtype in (torch.uint8, torch.int8)
    return None if is_byte else "the kernel's output is quantized with parameters of run time"


def with_output(match: Match) -> fx.Node | str:
    """Lets a kernel quantize its result as the root of a match does; returns the kernel, or why none does."""
    node: fx.Node = match["kernel"]
    params = qparams(match.root)
    reason = output_objection(params)
    if reason is not None:
        return reason
    numbers = {"output_scale": params.scale, "output_zero_point": params.zero_point, "output_dtype": params.dtype}
    for name, found in numbers.items():
        set_operand(node, name, found)
    node.meta["val"] = node.meta["val"].to(params.dtype)
    return node


def bounded(node: fx.Node, params: QParams) -> fx.Node:
    """Returns a kernel's integers within a range narrower than their dtype; kernels only saturate."""
    if params.dtype == torch.float32 or params.is_full_range:
        return node
    return call(node.next, torch.ops.aten.clamp.default, (node, params.quant_min, params.quant_max), node)
