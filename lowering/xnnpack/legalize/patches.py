"""Convolutions as linear layers over patches, over what each output number reads.

Before: an integer convolution whose stride is its kernel, of so few channels that XNNPACK's kernel, which reads eight
at a time, works mostly on padding: the three colours of an image. After: the same integers from one linear layer.

Before: a convolution whose weight is stored in int8 or float16 beside float activations; XNNPACK's convolutions of
floats take float32 filters alone. After: a linear layer, which takes narrow weights. These patches overlap, so that
writing them costs memory and time; the file has the narrow weight.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, fx
from torchao.quantization.pt2e.quantizer import QuantizationConfig

from quantplug.core.graph.editing import call_like, constant
from quantplug.core.graph.facts import operands, tensor_value
from quantplug.core.graph.traits import per_dimension
from quantplug.core.patterns.language import Match
from quantplug.core.qdq.calls import QuantizedCall, quantized_calls
from quantplug.core.qdq.nodes import is_dequantize
from quantplug.core.qdq.qparams import QParams, requantize

_ATEN = torch.ops.aten
# Channels that XNNPACK's integer kernels read at once.
_READ_AT_ONCE = 8
# What ExecuTorch's delegates join at once.
_JOINED_AT_ONCE = 4
# Beyond these, as in the first layers of many networks, patches are much larger than the image and the weight is small.
MOST_TAPS = 25


def tiles_are_linear(working: fx.GraphModule) -> None:
    """Writes convolutions of patches side by side as linear layers where a third of the work would be padding."""
    for call in quantized_calls(working.graph, ("aten::conv2d",)):
        entered, output, stored, image = call.entered, call.yielded, call.stored, tensor_value(call.input)
        if output is None or entered is None or stored is None or image is None or stored.dim() != 4:
            continue
        if not is_dequantize(call.weight) or not entered.is_int8 or not output.is_int8:
            continue
        if _is_tiled(call.operands, stored, list(image.shape)):
            tiles = _tiles(call, entered, stored, list(image.shape))
            _write_linear(call, tiles, stored.flatten(1).clone(), 2, output)


def narrow_convolutions_are_linear(working: fx.GraphModule) -> None:
    """Writes convolutions with weights narrower than their kernel takes as linear layers, where that can be."""
    for call in quantized_calls(working.graph, ("aten::conv1d", "aten::conv2d")):
        stored, image = _narrow(call), tensor_value(call.input)
        if stored is not None and image is not None and patch_objection(call.operands, stored, image) is None:
            dims = stored.dim() - 2
            windows = [_Window.of(call.operands, stored, image, axis) for axis in range(dims)]
            rows = _patches(working.graph, call.node, windows, image)
            _write_linear(call, rows, stored.permute(0, *range(2, 2 + dims), 1).flatten(1).contiguous(), dims)


def patches_if_float(match: Match, config: QuantizationConfig) -> str | None:
    """Holds for a convolution unless its input "x" stays float beside a weight "w" whose patches are not written."""
    if config.input_activation is not None:
        return None
    weight, image = tensor_value(match["w"]), tensor_value(match["x"])
    if weight is None or image is None:
        return "the config quantizes weights only, and the shapes are not known"
    reason = patch_objection(operands(match["op"]), weight, image)
    return reason and f"the config quantizes weights only, which only linear layers read, and {reason}"


def patch_objection(given: Mapping[str, Any], weight: Tensor, image: Tensor) -> str | None:
    """Returns why the patches of a convolution are not written, or None.

    Args:
        given: its operands by name.
        weight: its weight.
        image: what it reads.
    """
    taps = math.prod(weight.shape[2:])
    if given["groups"] != 1:
        return f"it has {given['groups']} groups"
    if taps > MOST_TAPS:
        return f"each of its outputs reads {taps} numbers a channel, more than {MOST_TAPS}"
    if not all(isinstance(size, int) for size in image.shape[-(weight.dim() - 2) :]):
        return "the size of what it reads is open"
    return None


def _narrow(call: QuantizedCall) -> Tensor | None:
    """Returns the integers or halves of a weight beside a float image, None for other convolutions."""
    stored, narrow = call.stored, torch.int8 if is_dequantize(call.weight) else torch.float16
    return stored if not is_dequantize(call.input) and stored is not None and stored.dtype == narrow else None


@dataclass(frozen=True)
class _Window:
    """What the outputs read along one dimension: `taps` numbers, `dilation` apart, from every `stride`-th on.

    Attributes:
        size: of the image.
        before: zeros in front of it.
    """

    size: int
    before: int
    taps: int
    stride: int
    dilation: int
    outputs: int

    @classmethod
    def of(cls, given: Mapping[str, Any], weight: Tensor, image: Tensor, axis: int) -> "_Window":
        stride, dilation = (per_dimension(given[name], weight.dim() - 2)[axis] for name in ("stride", "dilation"))
        size, taps = int(image.shape[2 + axis]), int(weight.shape[2 + axis])
        reach = dilation * (taps - 1)
        if isinstance(given["padding"], str):
            before, both = (reach // 2, reach) if given["padding"] == "same" else (0, 0)
        else:
            before = per_dimension(given["padding"], weight.dim() - 2)[axis]
            both = 2 * before
        return cls(size, before, taps, stride, dilation, (size + both - reach - 1) // stride + 1)

    @property
    def steps(self) -> int:
        """Groups of `stride` numbers that the taps reach into."""
        return max((tap * self.dilation) // self.stride for tap in range(self.taps)) + self.outputs

    @property
    def after(self) -> int:
        """Zeros behind the image that make whole groups of it."""
        return max(0, self.held - self.before - self.size)

    @property
    def held(self) -> int:
        """Numbers of the image and the zeros about it that are read, in whole groups."""
        return self.steps * self.stride


def _patches(graph: fx.Graph, node: fx.Node, windows: list[_Window], image: Tensor) -> fx.Node:
    """Returns what each output reads as a row: (batch, outputs of each dimension, taps x channels)."""
    channels, dims = int(image.shape[1]), len(windows)
    batch = int(image.shape[0]) if isinstance(image.shape[0], int) else -1
    rows: fx.Node = operands(node)["input"]
    with graph.inserting_before(node):
        margins = [side for w in reversed(windows) for side in (w.before, w.after)]
        if any(margins):
            rows = call_like(graph, node, _ATEN.constant_pad_nd.default, rows, margins, 0.0)
        rows = call_like(graph, node, _ATEN.permute.default, rows, [0, *range(2, 2 + dims), 1])
        for axis, window in enumerate(windows, 1):
            if window.before + window.size + window.after > window.held:
                rows = _part(graph, node, rows, axis, 0, window.held)
        strided = any(window.stride > 1 for window in windows)
        if strided:
            steps = [size for window in windows for size in (window.steps, window.stride)]
            rows = call_like(graph, node, _ATEN.reshape.default, rows, [batch, *steps, channels])
        parts = []
        for place in product(*(range(window.taps) for window in windows)):
            part = rows
            for axis, (tap, window) in enumerate(zip(place, windows, strict=True)):
                step, phase = divmod(tap * window.dilation, window.stride)
                along = 1 + 2 * axis if strided else 1 + axis
                part = _part(graph, node, part, along, step, step + window.outputs)
                if strided:
                    part = _part(graph, node, part, along + 1, phase, phase + 1)
            if strided:
                sizes = [batch, *(window.outputs for window in windows), channels]
                part = call_like(graph, node, _ATEN.reshape.default, part, sizes)
            parts.append(part)
        while len(parts) > 1:
            groups = [parts[at : at + _JOINED_AT_ONCE] for at in range(0, len(parts), _JOINED_AT_ONCE)]
            parts = [g[0] if len(g) == 1 else call_like(graph, node, _ATEN.cat.default, g, dims + 1) for g in groups]
    return parts[0]


def _part(graph: fx.Graph, node: fx.Node, source: fx.Node, axis: int, begin: int, end: int) -> fx.Node:
    return call_like(graph, node, _ATEN.slice.Tensor, source, axis, begin, end)


def _is_tiled(values: Mapping[str, Any], weight: Tensor, image: list[Any]) -> bool:
    kernel, channels = list(weight.shape[2:]), weight.shape[1]
    if isinstance(values["padding"], str) or not all(isinstance(size, int) for size in image[2:]):
        return False
    stride, dilation = (per_dimension(values[name]) for name in ("stride", "dilation"))
    plain = values["groups"] == 1 and dilation == [1, 1] and not any(values["padding"])
    padded = -(-channels // _READ_AT_ONCE) * _READ_AT_ONCE
    whole = all(size % taps == 0 for size, taps in zip(image[2:], kernel, strict=True))
    return plain and whole and len(image) == 4 and stride == kernel != [1, 1] and 2 * padded >= 3 * channels


def _tiles(call: QuantizedCall, entered: QParams, weight: Tensor, image: list[Any]) -> fx.Node:
    """Returns the patches as rows: (batch, rows, columns, channels x height x width of a patch)."""
    channels, high, wide = weight.shape[1:]
    batch, grid = image[0] if isinstance(image[0], int) else -1, [image[2] // high, image[3] // wide]
    graph = call.node.graph
    moved: fx.Node = call.input
    moves: tuple[tuple[Any, list[int]], ...] = (
        (_ATEN.reshape.default, [batch, channels, grid[0], high, grid[1], wide]),
        (_ATEN.permute.default, [0, 2, 4, 1, 3, 5]),
        (_ATEN.reshape.default, [batch, *grid, channels * high * wide]),
    )
    with graph.inserting_before(call.node):
        for target, numbers in moves:
            moved = requantize(graph, call_like(graph, call.node, target, moved, numbers), entered)
    return moved


def _write_linear(call: QuantizedCall, rows: fx.Node, flat: Tensor, dims: int, output: QParams | None = None) -> None:
    """The convolution's node becomes the linear layer, with its channels last; a permute puts them second again.

    Args:
        call: the convolution.
        rows: what its outputs read.
        flat: its weight, a row for each channel of the output.
        dims: dimensions of the image.
        output: numbers of the integers that it yields, None for floats.
    """
    node, graph, users, weight = call.node, call.node.graph, list(call.node.users), call.weight
    held = constant(node, "patches", flat)
    if is_dequantize(weight):
        with graph.inserting_before(node):
            target: Any = weight.target
            held = call_like(graph, weight, target, held, *weight.args[1:])
    node.target, node.args, node.kwargs = _ATEN.linear.default, (rows, held, call.bias), {}
    with graph.inserting_before(node.next):
        made = node if output is None else requantize(graph, node, output)
        image = call_like(graph, node, _ATEN.permute.default, made, [0, dims + 1, *range(1, dims + 1)])
    image.meta["val"] = node.meta.pop("val", None)
    for user in users:
        user.replace_input_with(node, image)
