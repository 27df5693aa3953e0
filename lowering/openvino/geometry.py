"""Convolutions and averages that OpenVINO computes wrongly, in terms of others that it computes rightly.

Found by comparing programs with their graphs over random geometries (`tests/lowering/test_openvino_geometries.py`), and
seen with OpenVINO 2026.4 on processors with AVX512 and AMX.
"""

import sys

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from quantplug.core.errors import LoweringError
from quantplug.core.graph import describe, operands, tensor_value
from quantplug.core.pattern import Match, op, value
from quantplug.lowering.rewriting import Rule, absorb, apply, call, replace, viewed

aten = torch.ops.aten


def step_aside(graph: fx.Graph) -> None:
    """Rewrites the operators of a graph that OpenVINO computes wrongly, in place.

    Raises:
        LoweringError: an average has open sizes, for which there is no other form.
    """
    apply(graph, GEOMETRIES)


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


GEOMETRIES = (
    Rule(op("conv1d.default", "conv2d.default", "conv3d.default"), _column_by_column),
    Rule(op("avg_pool1d", "avg_pool2d", "avg_pool3d", self=value("x")), _padded_before),
)
