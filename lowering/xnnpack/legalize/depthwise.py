"""Depthwise convolutions with large kernels, as sums of such with small ones.

Before: a depthwise convolution with more taps than XNNPACK's depthwise kernels have. After: the same sum, in float, of
convolutions with parts of the kernel. XNNPACK would run the original as one matrix product for each channel, which
fills a sixteenth of its registers: 7 x 7 over 24 x 24 x 96 takes 2.2 ms so and 0.5 ms in float parts.
"""

import itertools
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.graph.editing import add_constant, call_like
from quantplug.core.graph.facts import constant_value, operands, tensor_value
from quantplug.core.graph.traits import per_dimension
from quantplug.core.qdq.nodes import is_dequantize, is_dynamic
from quantplug.core.qdq.qparams import QParams, folded, requantize, static_qparams
from quantplug.lowering.xnnpack.legalize.legalized import Legalized
from quantplug.lowering.xnnpack.legalize.operators import calls

_ATEN = torch.ops.aten
# The largest depthwise kernel of XNNPACK.
_TAPS = 25


def large_depthwise_is_sum(working: fx.GraphModule, found: Legalized) -> None:
    """Writes depthwise convolutions of more taps than a kernel has as sums; they differ by the rounding of floats."""
    for node in calls(working, ("aten::conv2d",)):
        values = operands(node)
        weight, source, result = values["weight"], tensor_value(values["input"]), tensor_value(node)
        kernel = folded(weight) if is_dequantize(weight) else constant_value(weight)
        if kernel is None or source is None or result is None or is_dynamic(values["input"]):
            continue
        sizes = (*source.shape[2:], *result.shape[2:])
        if source.dim() != 4 or not all(isinstance(size, int) for size in sizes) or isinstance(values["padding"], str):
            continue
        if kernel.shape[1] == 1 and kernel.shape[0] == values["groups"] and kernel[0].numel() > _TAPS:
            _write_sum(working, node, values, kernel.detach(), tuple(result.shape[2:]))
            found.floats[node.name] = f"XNNPACK's depthwise kernels end at {_TAPS} taps; in float parts it is faster"


def _write_sum(
    working: fx.GraphModule, node: fx.Node, values: dict[str, Any], kernel: Tensor, size: tuple[int, ...]
) -> None:
    """The original node becomes the convolution with the first part."""
    users, height, width = list(node.users), kernel.shape[2], kernel.shape[3]
    columns = min(width, _TAPS)
    rows = min(height, _TAPS // columns)
    total = node
    with working.graph.inserting_before(node):
        padded, entered = _padded(working, node, values)
    for top, left in itertools.product(range(0, height, rows), range(0, width, columns)):
        part = kernel[:, :, top : top + rows, left : left + columns].contiguous()
        with working.graph.inserting_before(node):
            held = add_constant(working, working.graph, part, "taps")
            seen = padded
            for axis, start in ((2, top), (3, left)):
                seen = _window(working, seen, entered, values, axis, start, part.shape[axis], size[axis - 2])
        if (top, left) == (0, 0):
            node.args = (seen, held, values["bias"], values["stride"], [0, 0], values["dilation"], values["groups"])
            continue
        with working.graph.inserting_before(node.next if total is node else total.next):
            added = call_like(working.graph, node, _ATEN.conv2d.default, seen, held, None, *node.args[3:])
            total = call_like(working.graph, node, _ATEN.add.Tensor, total, added)
    for user in users:
        user.replace_input_with(node, total)


def _padded(working: fx.GraphModule, node: fx.Node, values: dict[str, Any]) -> tuple[fx.Node, QParams | None]:
    """Returns the padded input, and its parameters if it can be moved as integers."""
    source = values["input"]
    params = static_qparams(source) if is_dequantize(source) else None
    entered = params if params is not None and params.is_int8 else None
    height, width = per_dimension(values["padding"])
    if height or width:
        pads = [width, width, height, height]
        source = call_like(working.graph, node, _ATEN.constant_pad_nd.default, source, pads, 0.0)
        source = requantize(working.graph, source, entered) if entered is not None else source
    return source, entered


def _window(
    working: fx.GraphModule,
    source: fx.Node,
    entered: QParams | None,
    values: dict[str, Any],
    axis: int,
    start: int,
    taps: int,
    size: int,
) -> fx.Node:
    """Returns what some rows or columns of the kernel see of the padded input."""
    stride, dilation = (per_dimension(values[name])[axis - 2] for name in ("stride", "dilation"))
    first = start * dilation
    last = first + (size - 1) * stride + (taps - 1) * dilation + 1
    found = call_like(working.graph, source, _ATEN.slice.Tensor, source, axis, first, last)
    return requantize(working.graph, found, entered) if entered is not None else found
