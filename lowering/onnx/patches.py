"""Convolutions as products of patches, where their result stays float.

Before: a convolution between integers, whose result a sum or a function takes in before anything is rounded, as in
kernels of oneDNN. After: the same numbers from a linear layer over what each place meets, the channels last. ONNX
Runtime's kernels of convolutions write integers, and it computes others in float; its kernel of products writes floats.
"""

from itertools import product
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.graph.editing import call, constant, viewed
from quantplug.core.graph.facts import constant_value, is_constant, operands, tensor_value
from quantplug.core.patterns.language import Match, op
from quantplug.core.patterns.rules import Rule
from quantplug.core.qdq.nodes import is_dequantize, is_quantize
from quantplug.core.qdq.qparams import static_qparams

_ATEN = torch.ops.aten
# Places that a kernel takes in: patches hold each number that often. And channels, from which on to lay out patches
# pays: measured, of 3x3 places 16 channels take 1.1 times the time of the float kernel, 32 channels 0.9.
_MOST, _FEWEST = 9, 32
_END = 2**63 - 1  # of a slice up to the end
_BYTES = (torch.uint8, torch.int8)


def patch_rule() -> Rule:
    """Returns the rule that writes a convolution with a float result as a linear layer over patches."""
    return Rule(op("conv1d.default", "conv2d.default", "conv3d.default"), _product_of_patches)


def _product_of_patches(match: Match) -> fx.Node | str:
    node, given = match.root, operands(match.root)
    value, stored, params = tensor_value(node), _stored(given["weight"]), static_qparams(given["input"])
    if all(map(is_quantize, node.users)):
        return "its result is rounded"
    if value is None or stored is None or params is None or params.dtype not in _BYTES:
        return "it reads no integers of 8 bits and known scale"
    places = stored.shape[2:].numel()
    if given["groups"] != 1 or places > _MOST or (places > 1 and stored.shape[1] < _FEWEST):
        return "it has groups, too many places or too few channels for a product of patches"
    if value.dim() != stored.dim():
        return "its input has no dimension of batches"
    rows = _dequantized(node, given["input"], _patches(node, given, stored.shape[2:], params.zero_point))
    held = stored.detach().movedim(1, -1).flatten(1).contiguous()
    weight = _dequantized(node, given["weight"], constant(node, f"{given['weight'].name}_rows", held))
    linear = call(node, _ATEN.linear.default, (rows, weight, given["bias"]), node)
    linear.meta["val"] = value.movedim(1, -1)
    return viewed(node, _ATEN.permute.default, linear, (0, value.dim() - 1, *range(1, value.dim() - 1)))


def _stored(weight: Any) -> Tensor | None:
    if not is_dequantize(weight) or not is_constant(weight.args[0]) or operands(weight).get("axis", 0) != 0:
        return None
    found = constant_value(weight.args[0])
    return found if found is not None and found.dtype == torch.int8 else None


def _dequantized(before: fx.Node, like: fx.Node, integers: fx.Node) -> fx.Node:
    """Dequantizes integers as another node does its own."""
    return _sized(call(before, like.target, (integers, *like.args[1:]), like), *integers.meta["val"].shape)


def _patches(node: fx.Node, given: dict[str, Any], kernel: torch.Size, zero: int) -> fx.Node:
    """Returns the integers that each place of the result is computed from, side by side in the last dimension."""
    last = len(kernel) + 1
    found = viewed(node, _ATEN.permute.default, given["input"].args[0], (0, *range(2, last + 1), 1))
    if any(given["padding"]):
        batch, *sizes, channels = found.meta["val"].shape
        padded = (size + 2 * more for size, more in zip(sizes, given["padding"], strict=True))
        ends = (0, 0, *(end for more in reversed(given["padding"]) for end in (more, more)))
        found = _sized(call(node, _ATEN.constant_pad_nd.default, (found, ends, zero), found), batch, *padded, channels)
    moved = [_met(node, given, found, zip(place, kernel, strict=True)) for place in product(*map(range, kernel))]
    if len(moved) == 1:
        return moved[0]
    *sizes, channels = moved[0].meta["val"].shape
    return _sized(call(node, _ATEN.cat.default, (moved, last), moved[0]), *sizes, len(moved) * channels)


def _met(node: fx.Node, given: dict[str, Any], source: fx.Node, place: Any) -> fx.Node:
    """Returns what one place of the kernel meets; a place is an index and a size for each dimension."""
    for axis, ((index, size), step) in enumerate(zip(place, given["stride"], strict=True), 1):
        dilation = given["dilation"][axis - 1]
        begin, left = index * dilation, (size - 1 - index) * dilation
        if begin or left or step > 1:
            sizes = list(source.meta["val"].shape)
            sizes[axis] = node.meta["val"].shape[axis + 1]
            args = (source, axis, begin, -left if left else _END, step)
            source = _sized(call(node, _ATEN.slice.Tensor, args, source), *sizes)
    return source


def _sized(node: fx.Node, *sizes: Any) -> fx.Node:
    """Notes the sizes of what a node yields; to compute it would compare sizes, and close those that are open."""
    node.meta["val"] = node.meta["val"].new_empty(sizes)
    return node
