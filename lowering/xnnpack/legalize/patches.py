"""Convolutions over patches side by side, as linear layers over the patches.

Before: an integer convolution whose stride is its kernel, of so few channels that XNNPACK's kernel, which reads eight
at a time, works mostly on padding: the three colours of an image. After: the same integers from one linear layer.
"""

from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.graph.editing import add_constant, call_like
from quantplug.core.graph.facts import constant_value, operands, tensor_value
from quantplug.core.graph.traits import per_dimension
from quantplug.core.qdq.nodes import is_dequantize
from quantplug.core.qdq.qparams import QParams, quantized_output, requantize, static_qparams
from quantplug.lowering.xnnpack.legalize.operators import calls, first_input

_ATEN = torch.ops.aten
# Channels that XNNPACK's integer kernels read at once.
_READ_AT_ONCE = 8


def patches_are_linear(working: fx.GraphModule) -> None:
    """Writes convolutions of patches as linear layers where a third of the work or more would be padding."""
    for node in calls(working, ("aten::conv2d",)):
        values, output = operands(node), quantized_output(node)
        source, weight = values["input"], values["weight"]
        entered = static_qparams(source) if is_dequantize(source) else None
        held: Any = first_input(weight) if is_dequantize(weight) else None
        stored = constant_value(held) if isinstance(held, fx.Node) else None
        image = tensor_value(source)
        if output is None or entered is None or stored is None or image is None or stored.dim() != 4:
            continue
        if entered.is_int8 and output.is_int8 and _is_patches(values, stored, list(image.shape)):
            _write_linear(working, node, _tokens(working, node, entered, stored, list(image.shape)), stored, output)


def _is_patches(values: dict[str, Any], weight: Tensor, image: list[Any]) -> bool:
    kernel, channels = list(weight.shape[2:]), weight.shape[1]
    if isinstance(values["padding"], str) or not all(isinstance(size, int) for size in image[2:]):
        return False
    stride, dilation = (per_dimension(values[name]) for name in ("stride", "dilation"))
    plain = values["groups"] == 1 and dilation == [1, 1] and not any(values["padding"])
    padded = -(-channels // _READ_AT_ONCE) * _READ_AT_ONCE
    whole = all(size % taps == 0 for size, taps in zip(image[2:], kernel, strict=True))
    return plain and whole and len(image) == 4 and stride == kernel != [1, 1] and 2 * padded >= 3 * channels


def _tokens(working: fx.GraphModule, node: fx.Node, entered: QParams, weight: Tensor, image: list[Any]) -> fx.Node:
    """Returns the patches as rows: (batch, rows, columns, channels x height x width of a patch)."""
    channels, high, wide = weight.shape[1:]
    batch, grid = image[0] if isinstance(image[0], int) else -1, [image[2] // high, image[3] // wide]
    moved: fx.Node = operands(node)["input"]
    moves: tuple[tuple[Any, list[int]], ...] = (
        (_ATEN.reshape.default, [batch, channels, grid[0], high, grid[1], wide]),
        (_ATEN.permute.default, [0, 2, 4, 1, 3, 5]),
        (_ATEN.reshape.default, [batch, *grid, channels * high * wide]),
    )
    with working.graph.inserting_before(node):
        for target, numbers in moves:
            moved = requantize(working.graph, call_like(working.graph, node, target, moved, numbers), entered)
    return moved


def _write_linear(working: fx.GraphModule, node: fx.Node, tokens: fx.Node, stored: Tensor, output: QParams) -> None:
    """The convolution's node becomes the linear layer, with its channels last; a permute puts them first again."""
    values, graph, users = operands(node), working.graph, list(node.users)
    weight = values["weight"]
    with graph.inserting_before(node):
        flat = add_constant(working, graph, stored.flatten(1).clone(), "patches")
        held = call_like(graph, weight, weight.target, flat, *weight.args[1:])
    node.target, node.args, node.kwargs = _ATEN.linear.default, (tokens, held, values["bias"]), {}
    node.meta.pop("val", None)
    with graph.inserting_before(node.next):
        image = call_like(graph, node, _ATEN.permute.default, requantize(graph, node, output), [0, 3, 1, 2])
    for user in users:
        user.replace_input_with(node, image)
