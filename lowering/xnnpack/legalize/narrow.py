"""Convolutions of float images with narrow weights, as linear layers over patches.

Before: a convolution whose weight is stored in int8 or float16 beside float activations; XNNPACK's convolutions of
floats take float32 filters alone. After: a linear layer, which takes narrow weights, over what each output number
reads. The patches overlap, so that writing them costs memory and time; the file has the narrow weight.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, fx
from torchao.quantization.pt2e.quantizer import QuantizationConfig

from quantplug.core.graph.editing import add_constant, call_like
from quantplug.core.graph.facts import constant_value, operands, tensor_value
from quantplug.core.patterns.language import Match
from quantplug.core.qdq.nodes import is_dequantize
from quantplug.lowering.xnnpack.legalize.operators import calls, first_input

_ATEN = torch.ops.aten
# What ExecuTorch's delegates join at once.
_JOINED_AT_ONCE = 4
# Beyond these, as in the first layers of many networks, patches are much larger than the image and the weight is small.
MOST_TAPS = 25


def narrow_convolutions_are_linear(working: fx.GraphModule) -> None:
    """Writes convolutions with weights narrower than their kernel takes as linear layers, where that can be."""
    for node in calls(working, ("aten::conv1d", "aten::conv2d")):
        given = operands(node)
        stored, image = _narrow(given), tensor_value(given["input"])
        if stored is not None and image is not None and patch_objection(given, stored, image) is None:
            windows = [_Window.of(given, stored, image, axis) for axis in range(stored.dim() - 2)]
            _write_linear(working, node, _patches(working.graph, node, windows, image), stored)


def patches_if_float(match: Match, config: QuantizationConfig) -> str | None:
    """Holds for a convolution unless its input "x" stays float beside a weight "w" whose patches are not written."""
    if config.input_activation is not None:
        return None
    weight, image = tensor_value(match["w"]), tensor_value(match["x"])
    if weight is None or image is None:
        return "the config quantizes weights only, and the shapes are not known"
    reason = patch_objection(operands(match["op"]), weight, image)
    return reason and f"the config quantizes weights only, which only linear layers read, and {reason}"


def patch_objection(given: dict[str, Any], weight: Tensor, image: Tensor) -> str | None:
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


def _narrow(given: dict[str, Any]) -> Tensor | None:
    """Returns the integers or halves of a weight beside a float image, None for other convolutions."""
    weight, source = given["weight"], given["input"]
    if is_dequantize(source):
        return None
    held: Any = first_input(weight) if is_dequantize(weight) else weight
    stored = constant_value(held) if isinstance(held, fx.Node) else None
    narrow = torch.int8 if is_dequantize(weight) else torch.float16
    return stored if stored is not None and stored.dtype == narrow else None


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
    def of(cls, given: dict[str, Any], weight: Tensor, image: Tensor, axis: int) -> "_Window":
        stride, dilation = (_at(given[name], axis) for name in ("stride", "dilation"))
        size, taps = int(image.shape[2 + axis]), int(weight.shape[2 + axis])
        reach = dilation * (taps - 1)
        if isinstance(given["padding"], str):
            before, both = (reach // 2, reach) if given["padding"] == "same" else (0, 0)
        else:
            before = _at(given["padding"], axis)
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


def _at(numbers: Sequence[int], axis: int) -> int:
    return int(numbers[axis] if axis < len(numbers) else numbers[0])


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


def _write_linear(working: fx.GraphModule, node: fx.Node, rows: fx.Node, stored: Tensor) -> None:
    """The convolution's node becomes the linear layer, with its channels last; a permute puts them second again."""
    given, graph, users = operands(node), working.graph, list(node.users)
    weight, dims = given["weight"], stored.dim() - 2
    with graph.inserting_before(node):
        flat = stored.permute(0, *range(2, 2 + dims), 1).flatten(1).contiguous()
        held = add_constant(working, graph, flat, "patches")
        if is_dequantize(weight):
            target: Any = weight.target
            held = call_like(graph, weight, target, held, *weight.args[1:])
    node.target, node.args, node.kwargs = _ATEN.linear.default, (rows, held, given["bias"]), {}
    with graph.inserting_before(node.next):
        image = call_like(graph, node, _ATEN.permute.default, node, [0, dims + 1, *range(1, dims + 1)])
    image.meta["val"] = node.meta.pop("val", None)
    for user in users:
        user.replace_input_with(node, image)
