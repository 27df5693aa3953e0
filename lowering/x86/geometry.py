"""Which convolutions oneDNN's int8 kernels compute rightly.

Found by comparing them with exact integers over random geometries (`tests/lowering/test_x86_geometries.py`), and seen
with oneDNN 3.12, that of torch 2.13, most of it on processors with AVX512 and AMX, one with AVX2; a file is for any of
them, so that the same holds everywhere. Some of it writes beyond its memory and ends the process.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torchao.quantization.pt2e.quantizer import QuantizationConfig

from quantplug.core.graph.editing import call, viewed
from quantplug.core.graph.facts import operands, tensor_value
from quantplug.core.graph.traits import per_dimension
from quantplug.core.patterns.language import Match, op
from quantplug.core.patterns.rules import Rule, apply
from quantplug.lowering.spelling import padding_in_numbers

aten = torch.ops.aten
Geometry = tuple[list[int], list[int], list[int], int]
# Tiles of AMX hold 64 bytes in a row.
TILE = 64
# How many channels AVX2's kernels read at once; of a rest of at most half of them they read memory that is no one's.
LANES = 16
# Kernels up to here and steps up to here are right whatever else they are.
WIDE, LONG = 7, 4


def geometry(node: fx.Node, kernel: Sequence[int]) -> Geometry | str:
    """Returns stride, padding, dilation and groups of a convolution as the kernels take them, or why they cannot.

    Args:
        node: the convolution, as the model's graph spells it.
        kernel: sizes of its window.
    """
    given, spatial = operands(node), len(kernel)
    if given.get("transposed"):
        return "transposed convolutions have no integer kernel in torch's oneDNN operators"
    padding, uneven = given["padding"], [0]
    if isinstance(padding, str):
        padding, uneven = padding_in_numbers(padding, kernel, given["dilation"])
    if any(uneven):
        return "padding 'same' is uneven for an even kernel size"
    stride, padding, dilation = (
        per_dimension(sizes, spatial) for sizes in (given["stride"], padding, given["dilation"])
    )
    return stride, padding, dilation, given["groups"]


def objection(sizes: Sequence[Any], weight: Sequence[int], given: Geometry) -> str | None:
    """Returns why the int8 kernel of a convolution must not be taken, or None.

    Args:
        sizes: of the input, its last dimensions those of the window; open ones count as the least they can be.
        weight: sizes of the weight.
        given: stride, padding, dilation, groups.
    """
    kernel, (stride, padding, dilation, _) = weight[2:], given
    sizes = sizes[-len(kernel) :]
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    if any(p > r for p, r in zip(padding, reach, strict=True)):
        return f"its padding {padding} is wider than the kernel reaches, {reach}"
    least = [least_size(size) for size in sizes]
    if any(p and r and size < d for p, r, size, d in zip(padding, reach, least, dilation, strict=True)):
        return f"its dilation {dilation} is wider than the image, {_named(sizes)}, over which oneDNN's kernels step"
    if len(kernel) == 3 and least[0] == 1 < kernel[0]:
        return f"its volume {_named(sizes)} has a depth of 1, where oneDNN's kernels with a depth of {kernel[0]} fail"
    width, (*_, step), (*_, edge) = kernel[-1], stride, padding
    if width > WIDE and edge and step > LONG:
        return f"its kernel of {width} columns goes on by {step} over padding, where oneDNN's kernels fail"
    tiled = width == step and not edge and not _leaves_rest(sizes[-1], step)
    if (tiled or width > WIDE) and _fills_tiles(width, weight[1]):
        return f"its kernel of {width} columns reads {weight[1]} channels as oneDNN's kernels for AMX do wrongly"
    return None


def _leaves_rest(size: Any, step: int) -> bool:
    """Tells whether steps surely do not end where an image ends."""
    return isinstance(size, int) and size % step > 0


def _fills_tiles(width: int, channels: int) -> bool:
    """Tells whether a row of a kernel fills several tiles of memory, and a column less than one."""
    return channels < TILE < width * channels and width * channels % TILE == 0


def right_shapes(match: Match, config: QuantizationConfig) -> str | None:
    """Holds for convolutions whose int8 kernels compute rightly, and for those that compute in float."""
    image, weight = tensor_value(match["x"]), tensor_value(match["w"])
    if config.input_activation is None or image is None or weight is None:
        return None
    found = geometry(match["op"], weight.shape[2:])
    return found if isinstance(found, str) else objection(image.shape, weight.shape, found)


def least_size(size: Any) -> int:
    """Returns a size, or the least that one can be that is open."""
    if isinstance(size, int):
        return size
    lower = size.node.shape_env.bound_sympy(size.node.expr).lower
    return max(int(lower), 1) if lower.is_Integer else 1


def _named(sizes: Sequence[Any]) -> str:
    """Returns sizes in words: of open ones the least."""
    return str([size if isinstance(size, int) else f"{least_size(size)} or more" for size in sizes]).replace("'", "")


def step_aside(graph: fx.Graph) -> None:
    """Spells convolutions otherwise that the kernels would read wrongly, so that they compute the same.

    - Where a stride makes one column of an image, errors are of 1e5. Such convolutions go over the image column by
      column, and of their results only those columns are taken that the stride would reach.
    - Where a window of one pixel goes on in strides over channels whose last 16 are 1 to 8, kernels for AVX2 read
      beyond them now and then: errors of 1e4. The pixels are taken first, and the convolution reads each of them.
    """
    apply(graph, STEPS)


def _one_by_one(match: Match) -> fx.Node | str:
    node, (given, packed) = match.root, _operands(match.root)
    image, weight = tensor_value(given["qx"]), tensor_value(packed["weight"])
    assert image is not None
    assert weight is not None
    stride, kernel, value = given["stride"], weight.shape[2:], node.meta["val"]
    reach = given["dilation"][-1] * (kernel[-1] - 1)
    if len(stride) < 2 or stride[-1] == 1 or kernel[-1] == 1 or statically_known_true(value.shape[-1] > 1):
        return "its result is more than one column wide"
    product = _in_steps(node, [*stride[:-1], 1])
    product.meta["val"] = value.new_empty(*value.shape[:-1], image.shape[-1] + 2 * given["padding"][-1] - reach)
    return _each(product, -1, stride[-1], node)


def _pixels_first(match: Match) -> fx.Node | str:
    node, (given, packed) = match.root, _operands(match.root)
    weight, stride = tensor_value(packed["weight"]), given["stride"]
    assert weight is not None
    if max(weight.shape[2:]) > 1 or max(stride) == 1 or given["groups"] > 1:
        return "it is no window of one pixel that goes on in strides"
    if not 1 <= weight.shape[1] % LANES <= LANES // 2:
        return "its channels fill what the kernels read at once"
    pixels = given["qx"]
    for dimension, step in enumerate(stride, 2):
        if step > 1:
            pixels = _each(pixels, dimension, step, node)
    sizes = packed["x_shape"] and [
        *packed["x_shape"][:2],
        *((size - 1) // step + 1 for size, step in zip(packed["x_shape"][2:], stride, strict=True)),
    ]
    return _in_steps(node, [1] * len(stride), qx=pixels, x_shape=sizes)


def _operands(node: fx.Node) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the operands of a convolution, and those that its weight was packed with."""
    given = operands(node)
    return given, operands(given["qw"])


def _in_steps(node: fx.Node, stride: list[int], **others: Any) -> fx.Node:
    """Writes a convolution that goes on in other steps, with other operands of its own or of its weight's packing."""
    given, packed = _operands(node)
    packed = {name: others.get(name, value) for name, value in {**packed, "stride": stride}.items()}
    weights = call(node, given["qw"].target, tuple(packed.values()), given["qw"])
    given = {name: others.get(name, value) for name, value in {**given, "stride": stride, "qw": weights}.items()}
    return call(node, node.target, tuple(given.values()), node)


def _each(source: fx.Node, dimension: int, step: int, before: fx.Node) -> fx.Node:
    """Writes what takes each so manyth index of a dimension.

    A slice would give open sizes other terms than those of the convolution, and they would no longer fit others.
    """
    windows = viewed(before, aten.unfold.default, source, dimension, 1, step)
    return viewed(before, aten.squeeze.dim, windows, -1)


CONVOLUTION = op("onednn::qconv_pointwise.default", "onednn::qconv_pointwise.tensor")
STEPS = (Rule(CONVOLUTION, _one_by_one), Rule(CONVOLUTION, _pixels_first))
