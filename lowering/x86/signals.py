"""Convolutions over one dimension that end in a function.

Before: a kernel over one dimension with a function that torch takes over two dimensions only. After: the same
kernel on an image of one row.
"""

from typing import Any

import torch
from torch import fx

from quantplug.core.graph import constant_value, operands
from quantplug.core.pattern import Match, op
from quantplug.lowering.rewriting import Rule, absorb, call, constant, replace

onednn, aten = torch.ops.onednn, torch.ops.aten
_OVER_ONE = ("none", "relu")


def _as_image(match: Match) -> str | None:
    node, given = match.root, operands(match.root)
    if len(given["stride"]) != 1 or given["attr"] in _OVER_ONE:
        return "its kernel takes the function as it is"
    image = call(node, aten.unsqueeze.default, (given["qx"], 2), given["qx"])
    image.meta["val"] = image.meta["val"].unsqueeze(2)
    changes = {"qx": image, "qw": _packed(node, given["qw"]), **_over_two(given)}
    row = call(node, node.target, tuple({**given, **changes}.values()), node)
    row.meta["val"] = row.meta["val"].unsqueeze(2)
    absorb(row, node)
    replace(node, call(node, aten.squeeze.dim, (row, 2), node))
    return None


def _packed(before: fx.Node, packed: fx.Node) -> fx.Node:
    given = operands(packed)
    values = constant_value(given["weight"])
    assert values is not None  # the rules of products put a constant there
    weight = constant(before, f"{before.name}_weight", values.unsqueeze(2))
    sizes = given.get("x_shape")
    shape = None if sizes is None else [*sizes[:2], 1, *sizes[2:]]
    changes = {"weight": weight, "x_shape": shape, **_over_two(given)}
    again = call(before, packed.target, tuple({**given, **changes}.values()), packed)
    again.meta["val"] = weight.meta["val"]
    return again


def _over_two(given: dict[str, Any]) -> dict[str, list[int]]:
    return {"stride": [1, *given["stride"]], "padding": [0, *given["padding"]], "dilation": [1, *given["dilation"]]}


SIGNALS_AS_IMAGES = (Rule(op("onednn::qconv_pointwise.default", "onednn::qconv_pointwise.tensor"), _as_image),)
