"""What OpenVINO computes wrongly, in terms of operators that it computes rightly.

Found by comparing programs with their graphs over random geometries (`tests/lowering/test_openvino_geometries.py`), and
seen with OpenVINO 2026.4 on processors with AVX512 and AMX.
"""

import sys
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from quantplug.core.errors import LoweringError
from quantplug.core.graph.editing import call, constant, viewed
from quantplug.core.graph.facts import constant_value, describe, operands, tensor_value
from quantplug.core.graph.operators import CLAMPS
from quantplug.core.graph.traits import clamp_bounds
from quantplug.core.patterns.language import Match, item, op, value
from quantplug.core.patterns.rules import Rule, apply
from quantplug.core.qdq.nodes import is_dequantize
from quantplug.core.qdq.qparams import dequantize

aten = torch.ops.aten

# The least that is added to a bias: lost in any rounding, and no denormal, which OpenVINO takes for zero.
_LEAST = 1e-30


def step_aside(graph: fx.Graph) -> None:
    """Rewrites the operators of a plainly spelled graph that OpenVINO computes wrongly, in place.

    Raises:
        LoweringError: an average has open sizes, for which there is no other form.
    """
    apply(graph, BIASES)
    apply(graph, OTHERS)


def _uneven(match: Match) -> fx.Node | str:
    """Past biases that are all one number OpenVINO moves the scales of channels on.

    Kernels that follow, such as reductions of rows, then apply them along another dimension.
    """
    node, given = match.root, operands(match.root)
    weight = tensor_value(given["weight"])
    if weight is None:
        return "its weight has scales for groups, which stay where they are"
    bias = _uneven_bias(node, given["bias"], weight.shape[0])
    if bias is None:
        return "its biases differ already, or it has no channels with scales of their own"
    node.args, node.kwargs = tuple({**given, "bias": bias}.values()), {}
    return node


def _uneven_bias(node: fx.Node, bias: Any, channels: int | torch.SymInt) -> fx.Node | None:
    """Returns biases that differ, by less than any rounding.

    None where they do already or are no constant, and where the number of channels is open: those of no constant,
    which alone has scales of channels.
    """
    held = constant_value(bias) if isinstance(bias, fx.Node) else torch.zeros(1, dtype=node.meta["val"].dtype)
    if held is None or held.dim() > 1 or held.min() != held.max() or not isinstance(channels, int):
        return None
    numbers, least = held.detach().broadcast_to(channels).clone(), torch.finfo(held.dtype)
    numbers[0] += max(abs(numbers[0].item()) * least.eps, least.tiny, _LEAST)
    return constant(node, f"{node.name}_bias", numbers)


def _column_by_column(match: Match) -> fx.Node | str:
    """Where a stride makes one column of an image, steps of one column are right."""
    node, given = match.root, operands(match.root)
    image, weight, stride = tensor_value(given["input"]), tensor_value(given["weight"]), given["stride"]
    result = node.meta["val"]
    if image is None or weight is None:
        return "its sizes are not known"
    if stride[-1] == 1 or weight.shape[-1] == 1 or statically_known_true(result.shape[-1] > 1):
        return "its result is more than one column wide"
    product = call(node, node.target, tuple({**given, "stride": [*stride[:-1], 1]}.values()), node)
    width = image.shape[-1] + 2 * given["padding"][-1] - given["dilation"][-1] * (weight.shape[-1] - 1)
    product.meta["val"] = result.new_empty(*result.shape[:-1], width)
    return viewed(node, aten.slice.Tensor, product, -1, 0, sys.maxsize, stride[-1])


def _padded_before(match: Match) -> fx.Node | str:
    """What stands over the image where sizes are rounded up counts as padding in OpenVINO, and not in torch.

    Padding that counts around integers is the integer zero there, not that of the number zero.
    """
    node, given = match.root, operands(match.root)
    if not (given["count_include_pad"] and any(given["padding"])):
        return "it counts no padding"
    if not given["ceil_mode"] and not is_dequantize(match["x"]):
        return "it rounds its size down"
    spatial = len(given["kernel_size"])
    sizes = node.meta["val"].shape[-spatial:]
    if not all(isinstance(size, int) for size in sizes):
        raise LoweringError(
            f"OpenVINO computes {describe(node)} wrongly, which counts its padding and rounds open sizes up; export "
            "it with fixed sizes, set `ceil_mode=False`, or use backend 'x86'."
        )
    edges = [edge for width in reversed(given["padding"]) for edge in (width, width)]
    padded = viewed(node, aten.constant_pad_nd.default, match["x"], edges)
    pooled = viewed(node, node.target, padded, *tuple({**given, "padding": [0] * spatial}.values())[1:])
    for dim, size in enumerate(sizes, -spatial):  # torch leaves out a window that begins in the padding
        pooled = viewed(node, aten.slice.Tensor, pooled, dim, 0, size)
    return pooled


def _selected(match: Match) -> fx.Node | str:
    """Clamps of integers that others read too are computed on the integers, by bounds whose fractions are cut off."""
    node = match.root
    found: fx.Node = match["x"]
    bounds = clamp_bounds(node)
    if bounds is None:
        return "its bounds are tensors"
    for bound, compare in zip(bounds, (aten.lt.Scalar, aten.gt.Scalar), strict=True):
        if bound is None:
            continue
        beyond = call(node, compare, (found, bound), node, torch.bool)
        limit = constant(node, f"{node.name}_bound", torch.tensor(float(bound), dtype=node.meta["val"].dtype))
        found = call(node, aten.where.self, (beyond, limit, found), node)
    return found


def _apart(match: Match) -> fx.Node | str:
    """Maxima of floats are written in the integers that something behind quantizes to, without the zero point."""
    node, extremes = match.root, match["extremes"]
    if is_dequantize(extremes.all_input_nodes[0]) or not node.meta["val"].is_floating_point():
        return "it compares integers"
    return _selection(node.next, node)


def _normed_in_float(match: Match) -> fx.Node | str:
    """Norms of integers that others read too add their epsilon to the variance of the integers."""
    node, source = match.root, match["x"]
    while len(source.all_input_nodes) == 1 and not is_dequantize(source):
        source = source.all_input_nodes[0]
    if not is_dequantize(source):
        return "it reads floats"
    node.replace_input_with(match["x"], _selection(node, match["x"]))
    return node


def _selection(before: fx.Node, source: fx.Node) -> fx.Node:
    """Inserts a selection that selects nothing but infinity, which no conversion passes and no kernel takes in."""
    dtype = source.meta["val"].dtype
    limit = constant(before, f"{source.name}_limit", torch.tensor(torch.finfo(dtype).max, dtype=dtype))
    beyond = call(before, aten.gt.Tensor, (source, limit), source, torch.bool)
    return call(before, aten.where.self, (beyond, limit, source), source)


def _squeezed(match: Match) -> fx.Node:
    """A squeeze without dimensions names all of them in the export, of which OpenVINO takes away whichever."""
    found: fx.Node = match["x"]
    single = [dim for dim, size in enumerate(found.meta["val"].shape) if statically_known_true(size == 1)]
    for dim in reversed(single):
        found = viewed(match.root, aten.squeeze.dim, found, dim)
    return found


_OF_VALUES = op("amax.default", "amin.default", "max.default", "min.default", name="extremes")
_WITH_INDICES = op(
    *("max.dim", "min.dim", "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"), name="extremes"
)
_CONVOLUTIONS = op("conv1d.default", "conv2d.default", "conv3d.default")
BIASES = (
    Rule(op("linear.default"), _uneven),
    Rule(_CONVOLUTIONS, _uneven),
)
_CLAMPS = op(*(name for name in CLAMPS if name != "relu"), self=dequantize(input=value("q"), name="x"))
_NORMS = op("layer_norm.default", "group_norm.default", "instance_norm.default", input=value("x"))
OTHERS = (
    Rule(_CONVOLUTIONS, _column_by_column),
    Rule(op("avg_pool1d", "avg_pool2d", "avg_pool3d", self=value("x")), _padded_before),
    Rule(_CLAMPS, _selected),
    Rule(_OF_VALUES, _apart),
    Rule(item(_WITH_INDICES, 0), _apart),
    Rule(_NORMS, _normed_in_float),
    Rule(op("squeeze.default", "squeeze_.default", self=value("x")), _squeezed),
)
