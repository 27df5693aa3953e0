"""Normalizations as rows of plain operators: a delegate that knows sums, products and square roots runs them whole.

Before: a graph with layer_norm, rms_norm, group_norm, instance_norm, and means over last dimensions. After: the same
numbers by products with a constant column, differences, squares and reciprocal square roots, in the type of the input.
Sources of the formulas: Ba et al., "Layer Normalization", 2016; Zhang and Sennrich, "Root Mean Square Layer
Normalization", 2019; Wu and He, "Group Normalization", 2018.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.graph.facts import operator_name, tensor_value
from quantplug.lowering.rewrites.writing import Writer, constant_operand, done, matching

_ATEN = torch.ops.aten


def norms_are_rows(model: fx.GraphModule, taken: Callable[[fx.Node], bool] | None = None) -> fx.GraphModule:
    """Writes normalizations of float32, and means over last dimensions, as sums and products along rows.

    Half precision stays: a square of more than 255 is no number of float16.

    Args:
        model: a graph module; it is changed in place and returned.
        taken: which nodes may be written so, None for all.
    """
    for node, values in matching(model, *_WRITTEN):
        source = tensor_value(next(iter(values.values())))
        if source is None or source.dtype != torch.float32 or (taken is not None and not taken(node)):
            continue
        write = Writer(model, node)
        written = _WRITTEN[operator_name(node).removeprefix("aten::")](write, values, source)
        if written is not None:
            write.replace(written)
    return done(model)


def _layer_norm(write: Writer, values: dict[str, Any], source: Tensor) -> fx.Node | None:
    rows = _Rows.of(write, values["input"], source, len(values["normalized_shape"]))
    if rows is None:
        return None
    return rows.standardized(values["eps"]).given_back(values["weight"], values["bias"])


def _rms_norm(write: Writer, values: dict[str, Any], source: Tensor) -> fx.Node | None:
    rows = _Rows.of(write, values["input"], source, len(values["normalized_shape"]))
    least = torch.finfo(source.dtype).eps if values["eps"] is None else values["eps"]
    return None if rows is None else rows.scaled(rows.data, least).given_back(values["weight"], None)


def _group_norm(write: Writer, values: dict[str, Any], source: Tensor) -> fx.Node | None:
    rows = _Rows.of(write, values["input"], source, source.dim() - 1, parts=values["num_groups"])
    if rows is None:
        return None
    return rows.standardized(values["eps"]).given_back(values["weight"], values["bias"], axis=1)


def _instance_norm(write: Writer, values: dict[str, Any], source: Tensor) -> fx.Node | None:
    if not values["use_input_stats"]:
        return None
    rows = _Rows.of(write, values["input"], source, source.dim() - 2)
    if rows is None:
        return None
    return rows.standardized(values["eps"]).given_back(values["weight"], values["bias"], axis=1)


def _mean(write: Writer, values: dict[str, Any], source: Tensor) -> fx.Node | None:
    axes = sorted(axis % source.dim() for axis in values["dim"] or ()) if source.dim() else []
    found = tensor_value(write.node)
    # Over the pixels of an image there is a kernel.
    if axes != list(range(source.dim() - len(axes), source.dim())) or (source.dim(), axes) == (4, [2, 3]):
        return None
    rows = _Rows.of(write, values["self"], source, len(axes)) if axes and found is not None else None
    if rows is None or found is None or found.dtype != source.dtype:
        return None
    return write.reshape(rows.averages(rows.data), *found.shape)


_WRITTEN: dict[str, Callable[[Writer, dict[str, Any], Tensor], fx.Node | None]] = {
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "instance_norm": _instance_norm,
    "mean": _mean,
}


@dataclass(frozen=True)
class _Rows:
    """What a normalization takes together, as rows along the last dimension.

    Attributes:
        write: writes the nodes.
        data: the node of the rows.
        length: numbers in a row.
        shape: sizes of the tensor that they come from.
    """

    write: Writer
    data: fx.Node
    length: int
    shape: torch.Size

    @classmethod
    def of(cls, write: Writer, node: fx.Node, value: Tensor, axes: int, parts: int = 1) -> "_Rows | None":
        """Returns the rows over the last axes of a tensor, each row in parts; None where their length is open."""
        kept, joined = value.shape[: value.dim() - axes], value.shape[value.dim() - axes :]
        is_static = all(isinstance(size, int) for size in joined) and sum(not isinstance(s, int) for s in kept) < 2
        if not kept or not is_static or math.prod(joined) == 0:
            return None
        length = math.prod(joined) // parts
        if parts > 1:
            return cls(write, write.reshape(node, *kept, parts, length), length, value.shape)
        return cls(write, node if axes == 1 else write.reshape(node, *kept, length), length, value.shape)

    def averages(self, data: fx.Node) -> fx.Node:
        """Returns the means of rows, one number in each."""
        column = self.write.constant(torch.full((1, self.length), 1.0 / self.length), "mean")
        return self.write.call(_ATEN.linear.default, data, column)

    def standardized(self, least: float) -> "_Rows":
        """Returns the rows with mean 0 and variance 1."""
        return self.scaled(self.write.call(_ATEN.sub.Tensor, self.data, self.averages(self.data)), least)

    def scaled(self, data: fx.Node, least: float) -> "_Rows":
        """Returns rows divided by the roots of their mean squares."""
        squares = self.averages(self.write.call(_ATEN.mul.Tensor, data, data))
        value = tensor_value(squares)
        assert value is not None
        raised = self.write.call(_ATEN.add.Tensor, squares, self.write.number(least, value, "eps"))
        factors = self.write.call(_ATEN.rsqrt.default, raised)
        return replace(self, data=self.write.call(_ATEN.mul.Tensor, data, factors))

    def given_back(self, weight: fx.Node | None, bias: fx.Node | None, axis: int | None = None) -> fx.Node:
        """Returns the rows in the tensor's shape, scaled and moved by element, or by what an axis counts."""
        written = tensor_value(self.data)
        assert written is not None
        found = self.data if written.shape == self.shape else self.write.reshape(self.data, *self.shape)
        for target, node in ((_ATEN.mul.Tensor, weight), (_ATEN.add.Tensor, bias)):
            value = tensor_value(node)
            if node is None or value is None:
                continue
            behind = 0 if axis is None else len(self.shape) - axis - 1
            sizes = [1] * (len(self.shape) - value.dim() - behind) + list(value.shape) + [1] * behind
            found = self.write.call(target, found, self._of_rank(node, sizes))
        return found

    def _of_rank(self, node: fx.Node, sizes: list[int]) -> fx.Node:
        """Returns a parameter in sizes of the tensor's rank, as ExecuTorch's layout pass asks for."""
        held = constant_operand(node)
        if held is None:
            return self.write.reshape(node, *sizes)
        return self.write.constant(held.detach().reshape(sizes), "scale_or_bias")
