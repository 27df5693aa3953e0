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
from quantplug.core.graph.editing import call, constant, replace, viewed
from quantplug.core.graph.facts import constant_value, describe, operands, tensor_value
from quantplug.core.graph.meta import absorb
from quantplug.core.patterns.language import Match, item, op, value
from quantplug.core.patterns.rules import Rule, apply
from quantplug.core.qdq.nodes import is_dequantize
from quantplug.core.qdq.qparams import dequantize
from quantplug.lowering.clamps import bounds_of

aten = torch.ops.aten

# The least that is added to a bias: lost in any rounding, and no denormal, which OpenVINO takes for zero.
_LEAST = 1e-30
_NO_CHANGE = "its biases differ already, or it has no channels with scales of their own"


def step_aside(graph: fx.Graph) -> None:
    """Rewrites the operators of a graph that OpenVINO computes wrongly, in place.

    Raises:
        LoweringError: an average has open sizes, for which there is no other form.
    """
    apply(graph, BIASES)
    apply(graph, OTHERS)


def _uneven(match: Match) -> str | None:
    """Past biases that are all one number OpenVINO moves the scales of channels on.

    Kernels that follow, such as reductions of rows, then apply them along another dimension.
    """
    node, given = match.root, operands(match.root)
    weight = tensor_value(given["weight"])
    if weight is None:
        return "its weight has scales for groups, which stay where they are"
    bias = _uneven_bias(node, given["bias"], weight.shape[0])
    if bias is None:
        return _NO_CHANGE
    node.args, node.kwargs = tuple({**given, "bias": bias}.values()), {}
    return None


def _uneven_product(match: Match) -> str | None:
    """The same of products, whose columns are the channels."""
    node, given = match.root, operands(match.root)
    is_sum = "mat1" in given
    bias = _uneven_bias(node, given["self"] if is_sum else None, node.meta["val"].shape[1])
    if bias is None:
        return _NO_CHANGE
    if is_sum:
        node.replace_input_with(given["self"], bias)
        return None
    product = call(node, aten.addmm.default, (bias, *node.args), node)
    absorb(product, node)
    replace(node, product)
    return None


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


def _column_by_column(match: Match) -> str | None:
    """Where a stride makes one column of an image, steps of one column are right."""
    node, given = match.root, operands(match.root)
    image, weight, stride = tensor_value(given["input"]), tensor_value(given["weight"]), given["stride"]
    result = node.meta["val"]
    if image is None or weight is None:
        return "its sizes are not known"
    if stride[-1] == 1 or weight.shape[-1] == 1 or statically_known_true(result.shape[-1] > 1):
        return "its result is more than one column wide"
    spatial = weight.dim() - 2
    padding, dilation = (list(given[name]) * spatial for name in ("padding", "dilation"))
    steps = (list(stride) * spatial)[: spatial - 1]
    product = call(node, node.target, tuple({**given, "stride": [*steps, 1]}.values()), node)
    width = image.shape[-1] + 2 * padding[spatial - 1] - dilation[spatial - 1] * (weight.shape[-1] - 1)
    product.meta["val"] = result.new_empty(*result.shape[:-1], width)
    absorb(product, node)
    replace(node, viewed(node, aten.slice.Tensor, product, -1, 0, sys.maxsize, stride[-1]))
    return None


def _padded_before(match: Match) -> str | None:
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
    widths = list(given["padding"]) * (spatial // len(given["padding"]))
    edges = [edge for width in reversed(widths) for edge in (width, width)]
    padded = viewed(node, aten.constant_pad_nd.default, match["x"], edges)
    pooled = viewed(node, node.target, padded, *tuple({**given, "padding": [0] * spatial}.values())[1:])
    absorb(pooled, node)
    for dim, size in enumerate(sizes, -spatial):  # torch leaves out a window that begins in the padding
        pooled = viewed(node, aten.slice.Tensor, pooled, dim, 0, size)
    replace(node, pooled)
    return None


def _selected(match: Match) -> str | None:
    """Clamps of integers that others read too are computed on the integers, by bounds whose fractions are cut off."""
    node = match.root
    found: Any = match["x"]
    bounds = bounds_of(node, str(node.target).split(".")[1])  # "aten.clamp.default"
    for bound, compare in zip(bounds, (aten.lt.Scalar, aten.gt.Scalar), strict=True):
        if bound is None:
            continue
        beyond = call(node, compare, (found, bound), node, torch.bool)
        limit = constant(node, f"{node.name}_bound", torch.tensor(float(bound), dtype=node.meta["val"].dtype))
        found = call(node, aten.where.self, (beyond, limit, found), node)
    absorb(found, node)
    replace(node, found)
    return None


def _apart(match: Match) -> str | None:
    """Maxima of floats are written in the integers that something behind quantizes to, without the zero point."""
    node, extremes = match.root, match["extremes"]
    if is_dequantize(extremes.all_input_nodes[0]) or not node.meta["val"].is_floating_point():
        return "it compares integers"
    readers = list(node.users)
    found = _selection(node.next, node)
    absorb(found, node)
    for reader in readers:
        reader.replace_input_with(node, found)
    return None


def _normed_in_float(match: Match) -> str | None:
    """Norms of integers that others read too add their epsilon to the variance of the integers."""
    node, source = match.root, match["x"]
    while len(source.all_input_nodes) == 1 and not is_dequantize(source):
        source = source.all_input_nodes[0]
    if not is_dequantize(source):
        return "it reads floats"
    node.replace_input_with(match["x"], _selection(node, match["x"]))
    return None


def _selection(before: fx.Node, source: fx.Node) -> fx.Node:
    """Inserts a selection that selects nothing but infinity, which no conversion passes and no kernel takes in."""
    dtype = source.meta["val"].dtype
    limit = constant(before, f"{source.name}_limit", torch.tensor(torch.finfo(dtype).max, dtype=dtype))
    beyond = call(before, aten.gt.Tensor, (source, limit), source, torch.bool)
    return call(before, aten.where.self, (beyond, limit, source), source)


def _squeezed(match: Match) -> str | None:
    """A squeeze without dimensions names all of them in the export, of which OpenVINO takes away whichever."""
    node, found = match.root, match["x"]
    single = [dim for dim, size in enumerate(found.meta["val"].shape) if statically_known_true(size == 1)]
    for dim in reversed(single):
        found = viewed(node, aten.squeeze.dim, found, dim)
        absorb(found, node)
    replace(node, found)
    return None


_OF_VALUES = op("amax.default", "amin.default", "max.default", "min.default", name="extremes")
_WITH_INDICES = op(
    *("max.dim", "min.dim", "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"), name="extremes"
)
_CONVOLUTIONS = op("conv1d.default", "conv2d.default", "conv3d.default")
BIASES = (
    Rule(op("linear.default"), _uneven),
    Rule(_CONVOLUTIONS, _uneven),
    Rule(op("mm.default", "addmm.default"), _uneven_product),
)
_CLAMPS = op("clamp.default", "hardtanh.default", "relu6.default", self=dequantize(input=value("q"), name="x"))
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
