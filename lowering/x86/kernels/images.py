"""Convolutions of what is no batch of images.

Before: a kernel over one dimension, or of a single image. After: the same kernel on a batch of images (of one row, of
one image), views around it; between two such kernels there is none. torch packs the weight of one dimension as that of
an image in any case, but then 2.13 tells compilers a wrong size of the result, and takes no function but relu; without
a batch it takes nothing.
"""

from typing import Any

import torch
from torch import fx

from quantplug.core.graph.editing import call, constant, viewed
from quantplug.core.graph.facts import constant_value, likely_sizes, operands, rank
from quantplug.core.patterns.language import Match, op, value
from quantplug.core.patterns.rules import Rule, apply

onednn, aten = torch.ops.onednn, torch.ops.aten
BATCH, ROW = 0, 2  # dimensions of an image


def as_images(graph: fx.Graph) -> None:
    """Lets every convolution kernel run on a batch of images or volumes."""
    apply(graph, AS_IMAGES)
    apply(graph, SAME_IMAGE)


def _as_image(match: Match) -> fx.Node | str:
    node, given = match.root, operands(match.root)
    dimensions = len(given["stride"])
    missing = [BATCH] * (rank(given["qx"]) == dimensions + 1) + [ROW] * (dimensions == 1)
    if not missing:
        return "it takes images or volumes"
    image = given["qx"]
    for dimension in missing:
        image = viewed(node, aten.unsqueeze.default, image, dimension)
    changes = {"qx": image, "qw": _packed(node, given["qw"], image), **_over_two(given)}
    kernel = call(node, node.target, tuple({**given, **changes}.values()), node)
    for dimension in missing:
        kernel.meta["val"] = kernel.meta["val"].unsqueeze(dimension)
    for dimension in reversed(missing):
        kernel = viewed(node, aten.squeeze.dim, kernel, dimension)
    return kernel


def _packed(before: fx.Node, packed: fx.Node, image: fx.Node) -> fx.Node:
    given = operands(packed)
    values = constant_value(given["weight"])
    assert values is not None  # the rules of products put a constant there
    if values.dim() == 3:
        given["weight"] = constant(before, f"{before.name}_weight", values.unsqueeze(ROW))
    shape = given.get("x_shape")
    if shape is not None:
        given["x_shape"] = list(likely_sizes(image))
    again = call(before, packed.target, tuple({**given, **_over_two(given)}.values()), packed)
    again.meta["val"] = given["weight"].meta["val"]
    return again


def _over_two(given: dict[str, Any]) -> dict[str, list[int]]:
    """Returns a kernel's geometry over two dimensions or three."""
    if len(given["stride"]) > 1:
        return {}
    return {"stride": [1, *given["stride"]], "padding": [0, *given["padding"]], "dilation": [1, *given["dilation"]]}


def _is_that_image(match: Match) -> fx.Node | str:
    image: fx.Node = match["image"]
    if rank(match.root) != rank(image):
        return "the dimension that is squeezed has other than one element"
    return image


AS_IMAGES = (Rule(op("onednn::qconv_pointwise.default", "onednn::qconv_pointwise.tensor"), _as_image),)
SAME_IMAGE = tuple(
    Rule(op("unsqueeze", self=op("squeeze.dim", self=value("image"), dim=dimension), dim=dimension), _is_that_image)
    for dimension in (BATCH, ROW)
)
