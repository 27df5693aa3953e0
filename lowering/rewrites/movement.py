"""Operators that only move data, as the slices and views that work on integers."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.graph.aliases import changed_under_other_names
from quantplug.core.graph.editing import set_operand
from quantplug.core.graph.facts import operator_name, sizes_of, tensor_value
from quantplug.core.graph.operators import SHUFFLES, VIEWS, schema_names
from quantplug.lowering.rewrites.writing import (
    Writer,
    axis_of,
    constant_operand,
    done,
    index_of,
    is_getitem,
    matching,
    open_among,
    permutation,
)

_ATEN = torch.ops.aten
# Slices, and copies, that cost less than to leave a delegate.
_RUNS = 16
_TIMES = 16


def view_is_reshape(model: fx.GraphModule) -> fx.GraphModule:
    """Writes view as reshape: a view holds for the strides that export saw, and rewrites and kernels give others.

    Export drops a `contiguous()` where the strides are right already. A view through which the model changes memory
    is left as it stands, as a copy would not. One open size is left to be inferred: XNNPACK reshapes by numbers.
    """
    changed = changed_under_other_names(model.graph)
    for node, values in matching(model, *VIEWS):
        if "size" in values and node in changed:
            continue
        sizes = values.get("size", values.get("shape"))
        if sizes is not None:
            node.target, node.args, node.kwargs = _ATEN.reshape.default, (values["self"], _numbered(node, sizes)), {}
    return done(model)


def _numbered(view: fx.Node, sizes: Sequence[Any]) -> list[Any]:
    """Returns the sizes of a view as numbers, -1 for one that is open; as they were where more are."""
    result = tensor_value(view)
    known = [] if result is None else [size if isinstance(size, int) else -1 for size in result.shape]
    return known if result is not None and known.count(-1) <= 1 and 0 not in known else list(sizes)


def split_is_slices(model: fx.GraphModule) -> fx.GraphModule:
    """Writes chunk, split and unbind as one slice (and view) for each piece that is used."""
    for node, values in matching(model, "chunk", "split", "split_with_sizes", "unbind", "tensor_split"):
        pieces = node.meta.get("val")
        getitems = list(node.users)
        if not isinstance(pieces, (list, tuple)) or not all(is_getitem(user) for user in getitems):
            continue
        source = tensor_value(values["self"])
        if source is None:
            continue
        axis = axis_of(values.get("dim", 0), source.dim())
        unbind = operator_name(node) == "aten::unbind"
        sizes = [1 if unbind else piece.shape[axis] for piece in pieces]
        if not all(isinstance(size, int) for size in (*sizes, source.shape[axis])):
            continue
        for user in getitems:
            index = index_of(user) % len(sizes)
            _slice_for(model, user, values["self"], axis, sum(sizes[:index]), sizes[index], unbind=unbind)
    return done(model)


def _slice_for(
    model: fx.GraphModule, node: fx.Node, source: fx.Node, axis: int, start: int, size: int, *, unbind: bool
) -> None:
    write = Writer(model, node)
    piece = write.call(_ATEN.slice.Tensor, source, axis, start, start + size)
    write.replace(write.call(_ATEN.squeeze.dim, piece, axis) if unbind else piece)


def select_is_slice(model: fx.GraphModule) -> fx.GraphModule:
    """Writes select(x, dim, i) as a slice of one element and a view without the dimension."""
    for node, values in matching(model, "select"):
        source = tensor_value(values["self"])
        index: Any = values["index"]
        if source is None or not source.is_floating_point() or not isinstance(index, int):
            continue
        axis = axis_of(values["dim"], source.dim())
        size: Any = source.shape[axis]
        if index < 0 and not isinstance(size, int):
            continue
        _slice_for(model, node, values["self"], axis, index if index >= 0 else index + size, 1, unbind=True)
    return done(model)


def patches_are_views(model: fx.GraphModule) -> fx.GraphModule:
    """Writes `unfold` and `fold` of patches that do not overlap, of static sizes, as views around a permutation."""
    for node, values in matching(model, "im2col", "col2im"):
        apart = "output_size" not in values
        image, kernel = tensor_value(values["self"] if apart else node), values["kernel_size"]
        if image is None or image.dim() != 4 or not all(isinstance(size, int) for size in image.shape[1:]):
            continue
        counts = [size // length for size, length in zip(image.shape[2:], kernel, strict=True)]
        is_plain = (values["dilation"], values["padding"], values["stride"]) == ([1, 1], [0, 0], kernel)
        if not is_plain or [count * length for count, length in zip(counts, kernel, strict=True)] != [*image.shape[2:]]:
            continue
        write, (batch, channels, *sides) = Writer(model, node), image.shape
        mixed, sorted_apart = (counts[0], kernel[0], counts[1], kernel[1]), (*kernel, *counts)
        cut = write.reshape(values["self"], batch, channels, *(mixed if apart else sorted_apart))
        turned = write.call(_ATEN.permute.default, cut, [0, 1, 3, 5, 2, 4] if apart else [0, 1, 4, 2, 5, 3])
        sizes = (channels * math.prod(kernel), math.prod(counts)) if apart else (channels, *sides)
        write.replace(write.reshape(turned, batch, *sizes))
    return done(model)


def index_is_slices(model: fx.GraphModule) -> fx.GraphModule:
    """Writes an index by a constant list as slices of neighbours side by side, such as x[:, [-1]]; flip is one too."""
    for node, values in matching(model, "index", "index_select", "flip"):
        source = tensor_value(values["self"])
        chosen = None if source is None else _chosen(node, values, source)
        if source is None or chosen is None or not source.is_floating_point():
            continue
        axis, index = chosen
        if not isinstance(source.shape[axis], int) or not 0 < len(runs := _runs(index % source.shape[axis])) <= _RUNS:
            continue
        write = Writer(model, node)
        parts = [write.call(_ATEN.slice.Tensor, values["self"], axis, *ends) for ends in runs]
        write.replace(parts[0] if len(parts) == 1 else write.call(_ATEN.cat.default, parts, axis))
    return done(model)


def _chosen(node: fx.Node, values: dict[str, Any], source: Tensor) -> tuple[int, Tensor] | None:
    """Returns along which axis an operator picks by which indices, None where it is not that simple."""
    if operator_name(node) == "aten::flip":
        axes = [axis_of(axis, source.dim()) for axis in values["dims"]]
        length: Any = source.shape[axes[0]] if len(axes) == 1 else None
        return (axes[0], torch.arange(length - 1, -1, -1)) if isinstance(length, int) else None
    before = [None] * axis_of(values.get("dim", 0), source.dim())
    listed = values["indices"] if "indices" in values else [*before, values["index"]]
    axes = [axis for axis, index in enumerate(listed) if index is not None]
    index = constant_operand(listed[axes[0]]) if len(axes) == 1 else None
    if index is None or index.dim() != 1 or index.dtype.is_floating_point or index.dtype == torch.bool:
        return None
    return axes[0], index


def _runs(index: Tensor) -> list[tuple[int, int]]:
    """Returns the neighbours in a list of indices, each as its first and what follows its last."""
    runs: list[tuple[int, int]] = []
    for place in index.tolist():
        if runs and runs[-1][1] == place:
            runs[-1] = (runs[-1][0], place + 1)
        else:
            runs.append((place, place + 1))
    return runs


def repeats_are_joined(model: fx.GraphModule) -> fx.GraphModule:
    """Writes repeat and repeat_interleave of a few times as cat of one tensor with itself, for which there is a kernel.

    An expansion is left: who reads it may broadcast. So are single numbers of tensors with open sizes, which products
    pick.
    """
    for node, values in matching(model, "repeat", "repeat_interleave.self_int"):
        source, result = tensor_value(values["self"]), tensor_value(node)
        if source is None or result is None or not source.is_floating_point() or open_among(result.shape) > 1:
            continue
        write, times = Writer(model, node), _numbers(values["repeats"])
        counts = [*times, *(size for size in source.shape if isinstance(size, int))]
        if not all(isinstance(count, int) and count > 0 for count in counts) or not 1 < math.prod(times) <= _TIMES:
            continue
        if operator_name(node) == "aten::repeat":
            new = [1] * (result.dim() - source.dim())
            found = write.reshape(values["self"], *new, *source.shape) if new else values["self"]
            for axis, count in enumerate(times):
                found = write.call(_ATEN.cat.default, [found] * count, axis) if count > 1 else found
            write.replace(found)
            continue
        if values.get("dim") is None:
            continue
        behind = axis_of(values["dim"], source.dim()) + 1
        if behind < source.dim() or not open_among(source.shape):
            apart = write.reshape(values["self"], *source.shape[:behind], 1, *source.shape[behind:])
            joined = write.call(_ATEN.cat.default, [apart] * times[0], behind)
            write.replace(write.reshape(joined, *result.shape))
    return done(model)


def strided_slice_is_view(model: fx.GraphModule) -> fx.GraphModule:
    """Writes x[start::step] as a view into steps, of which one element each is kept: XNNPACK slices without gaps.

    Where the last step is not whole, a slice that starts earlier is taken, or zeros are added behind. Tensors with open
    sizes are left alone: of their rows single numbers are picked by products.
    """
    changed = changed_under_other_names(model.graph)  # by way of the slice, as a copy could not
    for node, values in matching(model, "slice"):
        source, result, step = tensor_value(values["self"]), tensor_value(node), values.get("step", 1)
        if source is None or result is None or step == 1 or not source.is_floating_point() or node in changed:
            continue
        axis = axis_of(values["dim"], source.dim())
        size, count = source.shape[axis], result.shape[axis]
        if not all(isinstance(length, int) for length in (*source.shape, count, step)) or count == 0:
            continue
        start = _first(values.get("start"), size)
        begin = max(0, min(start, size - count * step))
        write, whole = Writer(model, node), values["self"]
        if begin + count * step > size:
            behind = [0, 0] * (source.dim() - 1 - axis) + [0, begin + count * step - size]
            whole = write.call(_ATEN.constant_pad_nd.default, whole, behind, 0.0)
        if (begin, begin + count * step) != (0, whole.meta["val"].shape[axis]):
            whole = write.call(_ATEN.slice.Tensor, whole, axis, begin, begin + count * step)
        steps = write.reshape(whole, *source.shape[:axis], count, step, *source.shape[axis + 1 :])
        kept = write.call(_ATEN.slice.Tensor, steps, axis + 1, start - begin, start - begin + 1)
        write.replace(write.reshape(kept, *result.shape))
    return done(model)


def _first(start: Any, size: int) -> int:
    """Returns the first index of a slice, which may be left out or counted from the end."""
    first = 0 if start is None else int(start)
    return max(0, first + size) if first < 0 else first


def roll_is_slices(model: fx.GraphModule) -> fx.GraphModule:
    """Writes roll along dimensions of static sizes as two slices in the other order, for each of them."""
    for node, values in matching(model, "roll"):
        source = tensor_value(values["self"])
        if source is None or not source.is_floating_point():
            continue
        shifts, dims = _numbers(values["shifts"]), _numbers(values.get("dims", ()))
        axes = [axis_of(axis, source.dim()) for axis in dims]
        sizes = [source.shape[axis] for axis in axes]
        if not axes or not all(isinstance(number, int) for number in (*sizes, *shifts)) or 0 in sizes:
            continue
        write = Writer(model, node)
        rolled = values["self"]
        for axis, shift, size in zip(axes, shifts, sizes, strict=True):
            if first := -shift % size:
                pieces = [write.call(_ATEN.slice.Tensor, rolled, axis, *ends) for ends in ((first, size), (0, first))]
                rolled = write.call(_ATEN.cat.default, pieces, axis)
        write.replace(write.call(_ATEN.clone.default, rolled) if rolled is values["self"] else rolled)
    return done(model)


def shuffle_is_permutation(model: fx.GraphModule) -> fx.GraphModule:
    """Writes shuffles of pixels and of channels as a permutation between two views, each of which takes integers."""
    for node, values in matching(model, *SHUFFLES):
        source, result = tensor_value(values["self"]), tensor_value(node)
        apart = None if source is None else _apart(operator_name(node).removeprefix("aten::"), values, source)
        if apart is None or source is None or result is None:
            continue
        (sizes, order), write = apart, Writer(model, node)
        pieces = write.call(_ATEN.permute.default, write.reshape(values["self"], source.shape[0], *sizes), order)
        write.replace(write.reshape(pieces, *result.shape))
    return done(model)


def _apart(name: str, values: dict[str, Any], source: Tensor) -> tuple[list[int], list[int]] | None:
    """Returns the sizes, behind the batch, of what a shuffle reorders, and the order; None for any other operator."""
    sizes: list[Any] = list(source.shape[1:])
    if len(sizes) != 3 or not all(isinstance(size, int) for size in sizes):
        return None
    channels, height, width = sizes
    if name == "channel_shuffle":
        return [values["groups"], channels // values["groups"], height, width], [0, 2, 1, 3, 4]
    if name == "pixel_shuffle":
        r = values["upscale_factor"]
        return [channels // r**2, r, r, height, width], [0, 1, 4, 2, 5, 3]
    if name == "pixel_unshuffle":
        r = values["downscale_factor"]
        return [channels, height // r, r, width // r, r], [0, 1, 3, 5, 2, 4]
    return None


def circular_padding_is_joined(model: fx.GraphModule) -> fx.GraphModule:
    """Writes a circular pad as its input between slices of it, for each dimension.

    ExecuTorch writes it as copies into an empty tensor, and takes the sizes of the example for all sizes on the way.
    """
    for node, values in matching(model, "pad"):
        source, ends = tensor_value(values["self"]), _numbers(values["pad"])
        if values.get("mode") != "circular" or source is None or not source.is_floating_point():
            continue
        axes = [source.dim() - 1 - place for place in range(len(ends) // 2)]
        sizes = [source.shape[axis] for axis in axes]
        if min(ends) < 0 or not all(isinstance(number, int) for number in (*sizes, *ends)):
            continue
        write, padded = Writer(model, node), values["self"]
        for axis, size, before, behind in zip(axes, sizes, ends[::2], ends[1::2], strict=True):
            first = [write.call(_ATEN.slice.Tensor, padded, axis, size - before, size)] if before else []
            last = [write.call(_ATEN.slice.Tensor, padded, axis, 0, behind)] if behind else []
            padded = write.call(_ATEN.cat.default, [*first, padded, *last], axis) if first or last else padded
        write.replace(write.call(_ATEN.clone.default, padded) if padded is values["self"] else padded)
    return done(model)


def _numbers(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def lone_concatenation_is_copy(model: fx.GraphModule) -> fx.GraphModule:
    """Writes cat([x]) as a copy, and leaves out what is empty: XNNPACK concatenates two tensors or more, none empty."""
    for node, values in matching(model, "cat"):
        full = [part for part in values["tensors"] if 0 not in sizes_of(part)]
        kinds = {value.dtype for value in map(tensor_value, (*full, node)) if value is not None}
        if len(full) == len(kinds) == 1:
            write = Writer(model, node)
            write.replace(write.call(_ATEN.clone.default, *full))
        elif 1 < len(full) < len(values["tensors"]):
            set_operand(node, "tensors", full)
    return done(model)


def squeeze_is_view(model: fx.GraphModule) -> fx.GraphModule:
    """Writes squeeze and unsqueeze to one open size at most as a view: XNNPACK has them for last dimensions alone."""
    for node, values in matching(model, "squeeze", "squeeze_", "unsqueeze", "unsqueeze_"):
        result = tensor_value(node)
        if result is None or not result.is_floating_point():
            continue
        sizes = [size if isinstance(size, int) else -1 for size in result.shape]
        if sizes.count(-1) > 1 or (-1 in sizes and 0 in sizes):
            continue
        write = Writer(model, node)
        write.replace(write.call(_ATEN.reshape.default, values["self"], sizes))
    return done(model)


def still_permutation_is_view(model: fx.GraphModule) -> fx.GraphModule:
    """Writes a transpose or permute as a view where it only moves dimensions of size one: the memory stays as it is."""
    for node, values in matching(model, "transpose", "permute"):
        source, result = tensor_value(values["self"]), tensor_value(node)
        if source is None or result is None or open_among(result.shape) > 1:
            continue
        sizes: list[Any] = list(source.shape)
        long = [axis for axis in permutation(node) if not (isinstance(sizes[axis], int) and sizes[axis] == 1)]
        if long == sorted(long):
            write = Writer(model, node)
            write.replace(write.reshape(values["self"], *result.shape))
    return done(model)


def view_of_view_is_view(model: fx.GraphModule) -> fx.GraphModule:
    """Lets a view read what the view before it reads, where nobody else reads that one."""
    for node in model.graph.nodes:
        if _is_view(node):
            while isinstance(source := node.args[0], fx.Node) and _is_view(source) and len(source.users) == 1:
                node.update_arg(0, source.args[0])
                source.graph.erase_node(source)
    return done(model)


def _is_view(node: fx.Node) -> bool:
    return operator_name(node) in schema_names(VIEWS)
