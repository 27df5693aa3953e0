"""Depthwise convolutions with large kernels, as sums of such with small ones.

Before: a depthwise convolution with more taps than XNNPACK's depthwise kernels have. After: the same sum, in float, of
convolutions with parts of the kernel. XNNPACK would run the original as one matrix product for each channel, which
fills a sixteenth of its registers: 7 x 7 over 24 x 24 x 96 takes 2.2 ms so and 0.5 ms in float parts.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torchao.quantization.pt2e.quantizer import QuantizationConfig

from quantplug.core.graph.editing import call_like, constant
from quantplug.core.graph.facts import tensor_value
from quantplug.core.graph.traits import per_dimension
from quantplug.core.patterns.language import Match
from quantplug.core.qdq.calls import QuantizedCall
from quantplug.core.qdq.nodes import is_dequantize
from quantplug.core.qdq.qparams import QParams, requantize, static_qparams
from quantplug.lowering.xnnpack.legalize.refusals import Refusal

_ATEN = torch.ops.aten
# The largest depthwise kernel of XNNPACK.
_TAPS = 25


def _why_not_whole(call: QuantizedCall) -> str | None:
    source, result, kernel = tensor_value(call.input), tensor_value(call.node), call.kernel
    if kernel is None or source is None or result is None or call.is_dynamic:
        return None
    sizes = (*source.shape[2:], *result.shape[2:])
    if (
        source.dim() != 4
        or not all(isinstance(size, int) for size in sizes)
        or isinstance(call.operands["padding"], str)
    ):
        return None
    is_large = kernel.shape[1] == 1 and kernel.shape[0] == call.operands["groups"] and kernel[0].numel() > _TAPS
    return f"XNNPACK's depthwise kernels end at {_TAPS} taps; in float parts it is faster" if is_large else None


def _write_sum(working: fx.GraphModule, call: QuantizedCall) -> None:
    """The original node becomes the convolution with the first part; the sum differs by the rounding of floats."""
    node, values, kernel, result = call.node, call.operands, call.kernel, tensor_value(call.node)
    assert kernel is not None
    assert result is not None
    size, users, (height, width) = tuple(result.shape[2:]), list(node.users), kernel.shape[2:]
    columns = min(width, _TAPS)
    rows = min(height, _TAPS // columns)
    total = node
    with working.graph.inserting_before(node):
        padded, entered = _padded(working, node, values)
    for top, left in itertools.product(range(0, height, rows), range(0, width, columns)):
        part = kernel.detach()[:, :, top : top + rows, left : left + columns].contiguous()
        held, seen = constant(node, "taps", part), padded
        with working.graph.inserting_before(node):
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


def _padded(working: fx.GraphModule, node: fx.Node, values: Mapping[str, Any]) -> tuple[fx.Node, QParams | None]:
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
    values: Mapping[str, Any],
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


def small_if_depthwise(match: Match, config: QuantizationConfig | None) -> str | None:
    """Holds unless a convolution is depthwise with more taps than XNNPACK's kernels have."""
    return _why_not_whole(QuantizedCall.of(match["op"]))


LARGE_DEPTHWISE = Refusal(("aten::conv2d",), _why_not_whole, instead=_write_sum)
