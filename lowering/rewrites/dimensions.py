"""Convolutions and poolings over one or three dimensions as those over two, which have kernels; scalars as tensors."""

from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from quantplug.core.graph.facts import operator_name, tensor_value
from quantplug.core.graph.traits import per_dimension
from quantplug.core.peers.torch_names import OpOverload
from quantplug.lowering.rewrites.writing import Writer, constant_operand, done, matching

_ATEN = torch.ops.aten


_OVER = {
    f"{name}{dimensions}d": dimensions
    for dimensions in (1, 2, 3)
    for name in ("conv", "conv_transpose", "max_pool", "avg_pool", "adaptive_avg_pool")
}


def sample_is_batch(model: fx.GraphModule) -> fx.GraphModule:
    """Writes convolutions and poolings of one sample as those of a batch of one; the runtime takes batches only."""
    for node, values in matching(model, *_OVER):
        name = "input" if "input" in values else "self"
        source = tensor_value(values[name])
        if source is None or source.dim() != _OVER[operator_name(node).removeprefix("aten::")] + 1:
            continue
        write, target = Writer(model, node), cast(OpOverload, node.target)
        batch = write.call(_ATEN.unsqueeze.default, values[name], 0)
        made = write.call(target, *{**values, name: batch}.values())
        write.replace(write.call(_ATEN.squeeze.dim, made, 0))
    return done(model)


def convolution_3d_is_2d(model: fx.GraphModule) -> fx.GraphModule:
    """Writes conv3d as one conv2d whose channels are those of all frames under the kernel.

    A frame of the output reads neighbouring frames of the input, which lie side by side as channels; the
    frames of the output are the batch. The runtime has no kernel that convolves over three dimensions.
    """
    for node, values in matching(model, "conv3d"):
        source, result, weight = (tensor_value(values["input"]), tensor_value(node), constant_operand(values["weight"]))
        if source is None or result is None or weight is None or not _is_one_convolution(values, source):
            continue
        write = Writer(model, node)
        frames = _frames(write, values, source, int(weight.shape[2]), int(result.shape[2]))
        flat = weight.detach().permute(0, 2, 1, 3, 4).reshape(weight.shape[0], -1, *weight.shape[3:])
        held = write.constant(nn.Parameter(flat) if isinstance(weight, nn.Parameter) else flat, "frames_weight")
        spatial = [list(values[name])[-2:] for name in ("stride", "padding", "dilation")]
        made = write.call(_ATEN.conv2d.default, frames, held, values["bias"], *spatial)
        channels, length, height, width = result.shape[1:]
        apart = write.call(_ATEN.reshape.default, made, [length, -1, channels, height, width])
        write.replace(write.call(_ATEN.permute.default, apart, [1, 2, 0, 3, 4]))
    return done(model)


def _is_one_convolution(values: dict[str, Any], source: Tensor) -> bool:
    static = all(isinstance(size, int) for size in source.shape[1:])
    plain = values["groups"] == 1 and not isinstance(values["padding"], str)
    return source.dim() == 5 and static and plain and next(iter(values["dilation"])) == 1


def _frames(write: Writer, values: dict[str, Any], source: Tensor, depth: int, length: int) -> fx.Node:
    """Returns the input as (output frames x batch, kernel frames x channels, height, width)."""
    batch, channels, frames, height, width = source.shape
    rows = write.reshape(
        write.call(_ATEN.permute.default, values["input"], [0, 2, 1, 3, 4]), batch, frames * channels, height, width
    )
    before, stride = (next(iter(values[name])) for name in ("padding", "stride"))
    if before:
        rows = write.call(_ATEN.constant_pad_nd.default, rows, [0, 0, 0, 0, before * channels, before * channels])
    starts = [t * stride * channels for t in range(length)]
    pieces = [write.call(_ATEN.slice.Tensor, rows, 1, start, start + depth * channels) for start in starts]
    return pieces[0] if len(pieces) == 1 else write.call(_ATEN.cat.default, pieces, 0)


def pooling_3d_is_2d(model: fx.GraphModule) -> fx.GraphModule:
    """Writes pooling over frames, height and width as one over height and width and one over frames."""
    for node, values in matching(model, "max_pool3d", "avg_pool3d"):
        source, result = tensor_value(values["self"]), tensor_value(node)
        if source is None or result is None or source.dim() != 5 or not _is_separable(values):
            continue
        write = Writer(model, node)
        batch, channels, frames, height, width = source.shape
        kind = _ATEN.avg_pool2d.default if "divisor_override" in values else _ATEN.max_pool2d.default
        images = write.reshape(values["self"], batch, channels * frames, height, width)
        images = _pooled(write, kind, images, values, slice(1, 3))
        columns = write.reshape(images, batch, channels, frames, result.shape[3] * result.shape[4])
        columns = _pooled(write, kind, columns, values, slice(0, 1))
        write.replace(write.reshape(columns, *result.shape))
    return done(model)


def _is_separable(values: dict[str, Any]) -> bool:
    if "divisor_override" not in values:
        return True
    padded = any(values["padding"]) and not values["count_include_pad"]
    return values["divisor_override"] is None and not padded and not values["ceil_mode"]


def _pooled(write: Writer, kind: Any, source: fx.Node, values: dict[str, Any], axes: slice) -> fx.Node:
    names = [name for name in ("kernel_size", "stride", "padding", "dilation") if name in values]
    given = {name: per_dimension(values[name] or values["kernel_size"], 3)[axes] for name in names}
    given["padding"] = per_dimension(values["padding"], 3)[axes]
    if set(given["kernel_size"]) == {1} and set(given["stride"]) == {1}:
        return source
    columns = {name: [*numbers, 0 if name == "padding" else 1] for name, numbers in given.items()}
    spatial = given if len(given["padding"]) == 2 else columns
    return write.call(kind, source, *spatial.values(), values["ceil_mode"])


def global_pooling_is_2d(model: fx.GraphModule) -> fx.GraphModule:
    """Writes adaptive average pooling to one element, over one or three dimensions, as that over two."""
    for node, values in matching(model, "adaptive_avg_pool1d", "adaptive_avg_pool3d"):
        source, result = tensor_value(values["self"]), tensor_value(node)
        if source is None or result is None or source.dim() == 2 or any(s != 1 for s in values["output_size"]):
            continue
        if source.dim() == 4 or not all(isinstance(size, int) for size in source.shape[1:]):
            continue
        write = Writer(model, node)
        batch, channels, *_, width = source.shape
        image = write.reshape(values["self"], batch, channels, source[0, 0].numel() // width, width)
        pooled = write.call(_ATEN.adaptive_avg_pool2d.default, image, [1, 1])
        write.replace(write.reshape(pooled, *result.shape))
    return done(model)


def pooling_1d_is_2d(model: fx.GraphModule) -> fx.GraphModule:
    """Writes max_pool1d and avg_pool1d as the pooling of images of one row."""
    kinds = {"max_pool1d": _ATEN.max_pool2d.default, "avg_pool1d": _ATEN.avg_pool2d.default}
    for node, values in matching(model, *kinds):
        source, result = tensor_value(values["self"]), tensor_value(node)
        if source is None or result is None or source.dim() != 3:
            continue
        write = Writer(model, node)
        batch, channels, width = source.shape
        flat = {
            name: [1, *per_dimension(values[name] or values["kernel_size"], 1)] for name in ("kernel_size", "stride")
        }
        flat["padding"] = [0, *per_dimension(values["padding"], 1)]
        last = [values["count_include_pad"]] if "count_include_pad" in values else []
        flat |= {"dilation": [1, *per_dimension(values["dilation"], 1)]} if "dilation" in values else {}
        row = write.reshape(values["self"], batch, channels, 1, width)
        name = str(node.target).split(".")[1]
        pooled = write.call(kinds[name], row, *flat.values(), values["ceil_mode"], *last)
        write.replace(write.reshape(pooled, *result.shape))
    return done(model)


def scalars_have_dimensions(model: fx.GraphModule) -> fx.GraphModule:
    """Writes x - x.mean() as x - x.mean().reshape([1] * x.dim()).

    ExecuTorch 1.4's layout pass fails on an input of a delegate that has no sizes.
    """
    for node, values in matching(model, "add", "sub", "mul", "div", "maximum", "minimum"):
        found, write = tensor_value(node), Writer(model, node)
        for operand in (values["self"], values["other"]):
            value = tensor_value(operand) if _is_computed(operand) else None
            if found is not None and value is not None and value.dim() == 0 < found.dim():
                node.replace_input_with(operand, write.call(_ATEN.reshape.default, operand, [1] * found.dim()))
    return done(model)


def _is_computed(operand: Any) -> bool:
    return isinstance(operand, fx.Node) and operand.op == "call_function"
