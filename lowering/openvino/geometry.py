"""Layers and averages that OpenVINO computes wrongly, in terms of others that it computes rightly.

Found by comparing programs with their graphs over random geometries (`tests/lowering/test_openvino_geometries.py`), and
seen with OpenVINO 2026.4 on processors with AVX512 and AMX.
"""

import sys
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from quantplug.core.errors import LoweringError
from quantplug.core.graph import constant_value, describe, operands, tensor_value
from quantplug.core.pattern import Match, op, value
from quantplug.lowering.rewriting import Rule, absorb, apply, call, constant, replace, viewed

aten = torch.ops.aten

# The least that is added to a bias: lost in any rounding, and no denormal, which OpenVINO takes for zero.
_LEAST = 1e-30


def step_aside(graph: fx.Graph) -> None:
    """Rewrites the operators of a graph that OpenVINO computes wrongly, in place.

    Raises:
        LoweringError: an average has open sizes, for which there is no other form.
    """
    apply(graph, BIASES)
    apply(graph, GEOMETRIES)


def _uneven(match: Match) -> str | None:
    """Past biases that are all one number OpenVINO moves the scales of channels on.

    Kernels that follow, such as reductions of rows, then apply them along another dimension.
    """
    node, given = match.root, operands(match.root)
    weight = tensor_value(given["weight"])
    assert weight is not None
    bias = _uneven_bias(node, given["bias"], weight.shape[0])
    if bias is None:
        return "its biases differ"
    node.args, node.kwargs = tuple({**given, "bias": bias}.values()), {}
    return None


def _uneven_product(match: Match) -> str | None:
    """The same of products with a constant."""
    node, given = match.root, operands(match.root)
    weight, is_sum = tensor_value(given["mat2"]), "mat1" in given
    assert weight is not None
    bias = _uneven_bias(node, given["self"] if is_sum else None, weight.shape[1])
    if bias is None:
        return "its biases differ"
    if is_sum:
        node.replace_input_with(given["self"], bias)
        return None
    product = call(node, aten.addmm.default, (bias, *node.args), node)
    absorb(product, node)
    replace(node, product)
    return None


def _uneven_bias(node: fx.Node, bias: Any, channels: int) -> fx.Node | None:
    """Returns biases that differ, by less than any rounding; None where they do already or are no constant."""
    held = constant_value(bias) if isinstance(bias, fx.Node) else torch.zeros(1, dtype=node.meta["val"].dtype)
    if held is None or held.dim() > 1 or len(held.unique()) > 1:
        return None
    numbers, least = held.detach().broadcast_to(channels).clone(), torch.finfo(held.dtype)
    numbers[0] += max(abs(numbers[0].item()) * least.eps, least.tiny, _LEAST)
    return constant(node, f"{node.name}_bias", numbers)


def _column_by_column(match: Match) -> str | None:
    """Where a stride makes one column of an image, steps of one column are right."""
    node, given = match.root, operands(match.root)
    image, weight, stride = tensor_value(given["input"]), tensor_value(given["weight"]), given["stride"]
    result = node.meta["val"]
    assert image is not None
    assert weight is not None
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
    """What stands over the image where sizes are rounded up counts as padding in OpenVINO, and not in torch."""
    node, given = match.root, operands(match.root)
    if not (given["ceil_mode"] and given["count_include_pad"] and any(given["padding"])):
        return "it rounds its size down or counts no padding"
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


_CONVOLUTIONS = op("conv1d.default", "conv2d.default", "conv3d.default")
BIASES = (
    Rule(op("linear.default"), _uneven),
    Rule(_CONVOLUTIONS, _uneven),
    Rule(op("mm.default", "addmm.default"), _uneven_product),
)
GEOMETRIES = (
    Rule(_CONVOLUTIONS, _column_by_column),
    Rule(op("avg_pool1d", "avg_pool2d", "avg_pool3d", self=value("x")), _padded_before),
)
