"""Means and poolings as the global average pooling and the convolutions that have integer kernels."""

import itertools
import math
import operator
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.graph.editing import erase_dead_code
from quantplug.core.graph.facts import operator_name, tensor_value
from quantplug.core.graph.traits import per_dimension
from quantplug.lowering.rewrites.writing import Writer, axis_of, done, matching

_ATEN = torch.ops.aten


def spatial_mean_keeps_dims(model: fx.GraphModule) -> fx.GraphModule:
    """Writes mean(x, [2, 3]) as mean(x, [2, 3], keepdim=True) and a view.

    Only the form that keeps the dimensions is XNNPACK's global average pooling.
    """
    for node, values in matching(model, "mean"):
        source = tensor_value(values["self"])
        if source is None or source.dim() != 4 or values.get("keepdim") or values.get("dtype") is not None:
            continue
        if sorted(axis_of(a, 4) for a in values.get("dim") or ()) != [2, 3]:
            continue
        write = Writer(model, node)
        pooled = write.call(_ATEN.mean.dim, values["self"], [-1, -2], True)
        write.replace(write.call(_ATEN.flatten.using_ints, pooled, 1))
    return done(model)


def global_pooling_is_mean(model: fx.GraphModule) -> fx.GraphModule:
    """Writes adaptive_avg_pool2d(x, 1) and avg_pool2d over the whole image as mean(x, [2, 3], keepdim=True)."""
    for node, values in matching(model, "adaptive_avg_pool2d", "avg_pool2d"):
        source = tensor_value(values["self"])
        if source is None or source.dim() != 4 or not _pools_whole_image(node, values, source):
            continue
        write = Writer(model, node)
        write.replace(write.call(_ATEN.mean.dim, values["self"], [-1, -2], True))
    return done(model)


def _pools_whole_image(node: fx.Node, values: dict[str, Any], source: Tensor) -> bool:
    if operator_name(node) == "aten::adaptive_avg_pool2d":
        return all(size == 1 for size in values["output_size"])
    kernel, padding = per_dimension(values["kernel_size"]), per_dimension(values["padding"])
    return kernel == list(source.shape[2:]) and padding == [0, 0] and values.get("divisor_override") is None


def indexed_pooling_is_plain(model: fx.GraphModule) -> fx.GraphModule:
    """Writes max_pool2d_with_indices as max_pool2d where only the maxima are used, as decompositions leave it."""
    erase_dead_code(model.graph)  # export writes down both results
    for node, values in matching(model, "max_pool2d_with_indices"):
        users = list(node.users)
        if any(user.target is not operator.getitem or user.args[1] != 0 for user in users):
            continue
        write = Writer(model, users[0])
        names = ("self", "kernel_size", "stride", "padding", "dilation", "ceil_mode")
        pooled = write.call(_ATEN.max_pool2d.default, *(values[name] for name in names))
        for user in users:
            user.replace_all_uses_with(pooled)
            model.graph.erase_node(user)
        model.graph.erase_node(node)
    return done(model)


def adaptive_max_pooling_is_plain(model: fx.GraphModule) -> fx.GraphModule:
    """Writes adaptive_max_pool1d, 2d and 3d as max_pool where its windows are all of one size and one distance apart.

    They are where the output divides the input, thus for one maximum of all. The runtime has no adaptive form.
    """
    erase_dead_code(model.graph)  # export writes down both results
    for node, values in matching(model, *_MAX_POOLS):
        source, users = tensor_value(values["self"]), list(node.users)
        if source is None or any(user.target is not operator.getitem or user.args[1] != 0 for user in users):
            continue
        sizes: Any = values["output_size"]
        windows = [_window(size, count) for size, count in zip(source.shape[-len(sizes) :], sizes, strict=True)]
        if None in windows:
            continue
        kernel, stride = zip(*(window for window in windows if window is not None), strict=True)
        pool = _MAX_POOLS[operator_name(node).removeprefix("aten::")]
        for user in users:
            write = Writer(model, user)
            write.replace(write.call(pool, values["self"], list(kernel), list(stride)))
        model.graph.erase_node(node)
    return done(model)


_MAX_POOLS: dict[str, Any] = {
    "adaptive_max_pool1d": _ATEN.max_pool1d.default,
    "adaptive_max_pool2d": _ATEN.max_pool2d.default,
    "adaptive_max_pool3d": _ATEN.max_pool3d.default,
}


def _window(size: Any, count: Any) -> tuple[int, int] | None:
    """Returns length and distance of an adaptive pooling's windows along one dimension, None where they vary."""
    if not isinstance(size, int) or not isinstance(count, int) or not 0 < count <= size:
        return None
    starts = [index * size // count for index in range(count)]
    lengths = {-(-(index + 1) * size // count) - start for index, start in enumerate(starts)}
    steps = {after - before for before, after in itertools.pairwise(starts)} or {size}
    return (lengths.pop(), steps.pop()) if len(lengths) == len(steps) == 1 else None


def average_pooling_is_depthwise(model: fx.GraphModule) -> fx.GraphModule:
    """Writes avg_pool2d as a depthwise convolution with equal weights.

    XNNPACK has no int8 average pooling. Equal weights quantize without error (127 steps of weight/127), so the
    int8 convolution rounds once, as a pooling kernel would.
    """
    for node, values in matching(model, "avg_pool2d"):
        source = tensor_value(values["self"])
        kernel, padding = per_dimension(values["kernel_size"]), per_dimension(values["padding"])
        unpadded = padding == [0, 0]
        if source is None or source.dim() != 4 or values["ceil_mode"] or values["divisor_override"] is not None:
            continue
        if not (values["count_include_pad"] or unpadded) or not isinstance(source.shape[1], int):
            continue
        channels = source.shape[1]
        write = Writer(model, node)
        weight = torch.full((channels, 1, *kernel), 1.0 / math.prod(kernel), dtype=source.dtype)
        stride = per_dimension(values["stride"]) if values["stride"] else kernel
        held = write.constant(weight, "average")
        write.replace(write.call(_ATEN.conv2d.default, values["self"], held, None, stride, padding, [1, 1], channels))
    return done(model)
