"""Normalizations as rows of plain operators: a delegate that knows sums, products and square roots runs them whole.

Before: a graph with layer_norm, rms_norm, group_norm, instance_norm, and means, sums, variances and lengths of vectors
along dimensions. After: the same numbers by products with a constant column, differences, squares and roots, in the
type of the input.
Sources of the formulas: Ba et al., "Layer Normalization", 2016; Zhang and Sennrich, "Root Mean Square Layer
Normalization", 2019; Wu and He, "Group Normalization", 2018.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.graph.facts import operator_name, tensor_value
from quantplug.lowering.rewrites.constants import line_of_batch_norm
from quantplug.lowering.rewrites.writing import (
    Writer,
    alike,
    constant_operand,
    done,
    index_of,
    is_getitem,
    matching,
    open_among,
)

_ATEN = torch.ops.aten


def norms_are_rows(model: fx.GraphModule, taken: Callable[[fx.Node], bool] | None = None) -> fx.GraphModule:
    """Writes normalizations of float32, and means over last dimensions, as sums and products along rows.

    Half precision stays: a square of more than 255 is no number of float16.

    Args:
        model: a graph module; it is changed in place and returned.
        taken: which nodes may be written so, None for all.
    """
    return _written_so(model, _NORMS, taken)


def reductions_are_rows(model: fx.GraphModule, taken: Callable[[fx.Node], bool] | None = None) -> fx.GraphModule:
    """Writes what models write normalizations with by hand so too: sums, variances and lengths along any dimensions.

    Args:
        model: a graph module; it is changed in place and returned.
        taken: which nodes may be written so, None for all.
    """
    _pairs_are_apart(model)
    return _written_so(model, _REDUCTIONS, taken)


_Written = Callable[[Writer, dict[str, Any], Tensor], fx.Node | None]


def _written_so(
    model: fx.GraphModule, forms: Mapping[str, _Written], taken: Callable[[fx.Node], bool] | None
) -> fx.GraphModule:
    for node, values in matching(model, *forms):
        source = tensor_value(next(iter(values.values())))
        if source is None or source.dtype != torch.float32 or (taken is not None and not taken(node)):
            continue
        write = Writer(model, node)
        written = forms[operator_name(node).removeprefix("aten::")](write, values, source)
        if written is not None:
            write.replace(written)
    return done(model)


def _pairs_are_apart(model: fx.GraphModule) -> None:
    """Writes var_mean and std_mean as two operators."""
    for node, values in matching(model, "var_mean", "std_mean"):
        spread = _ATEN.var if operator_name(node) == "aten::var_mean" else _ATEN.std
        given, keepdim = (values["self"], values.get("dim")), values.get("keepdim", False)
        for picked in filter(is_getitem, list(node.users)):
            write = Writer(model, picked)
            if index_of(picked) == 0:
                found = write.call(spread.correction, *given, correction=_correction(values), keepdim=keepdim)
            else:
                found = write.call(_ATEN.mean.dim, *given, keepdim)
            write.replace(found)


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


def _batch_norm(write: Writer, values: dict[str, Any], source: Tensor) -> fx.Node | None:
    """Writes what is no image, for which ExecuTorch has a way of its own."""
    line = line_of_batch_norm(values)
    if line is None or source.dim() == 4:
        return None
    sizes = [1, -1, *[1] * (source.dim() - 2)]
    factor, summand = (write.constant(part.reshape(sizes), "norm") for part in line)
    return write.call(_ATEN.add.Tensor, write.call(_ATEN.mul.Tensor, values["input"], factor), summand)


def _mean_of_last(write: Writer, values: dict[str, Any], source: Tensor) -> fx.Node | None:
    return _mean(write, values, source) if source.dim() - 1 in _axes(values, source) else None


def _mean(write: Writer, values: dict[str, Any], source: Tensor) -> fx.Node | None:
    if (source.dim(), _axes(values, source)) == (4, [2, 3]):
        return None  # over the pixels of an image there is a kernel
    return _along(write, values, source, lambda rows: rows.averages(rows.data))


def _sum(write: Writer, values: dict[str, Any], source: Tensor) -> fx.Node | None:
    return _along(write, values, source, lambda rows: rows.sums(rows.data, 1.0))


def _variance(write: Writer, values: dict[str, Any], source: Tensor) -> fx.Node | None:
    return _along(write, values, source, lambda rows: rows.variances(_correction(values)))


def _deviation(write: Writer, values: dict[str, Any], source: Tensor) -> fx.Node | None:
    return _along(write, values, source, lambda rows: rows.root(rows.variances(_correction(values))))


def _correction(values: dict[str, Any]) -> float:
    """Returns by how much less than the numbers there are the sum of squares is divided by."""
    given = values["correction"] if "correction" in values else values.get("unbiased", True)
    return 1.0 if given is None else float(given)


def _length(write: Writer, values: dict[str, Any], source: Tensor) -> fx.Node | None:
    order = values["ord"] if "ord" in values else values["p"]
    if operator_name(write.node) == "aten::linalg_norm" and order is not None:
        return None  # of a matrix, which is another
    target = {1: _ATEN.abs.default, 2: _ATEN.square.default, None: _ATEN.square.default}.get(order)
    if target is None:
        return None
    return _along(write, values, source, lambda rows: rows.powers(target, is_root=order != 1))


def _along(
    write: Writer, values: dict[str, Any], source: Tensor, along: Callable[["_Rows"], fx.Node | None]
) -> fx.Node | None:
    """Writes what makes one number of each row, along dimensions that are rows or become so."""
    axes, found = _axes(values, source), tensor_value(write.node)
    is_joined = bool(axes) and axes == list(range(axes[0], axes[-1] + 1)) and len(axes) < source.dim()
    if not is_joined or found is None or found.dtype != source.dtype:
        return None
    kind = _Channels if (source.dim(), axes) == (4, [1]) else _Rows if axes[-1] == source.dim() - 1 else _Turned
    rows = kind.along(write, next(iter(values.values())), source, axes)
    result = None if rows is None else along(rows)
    written = tensor_value(result)
    if result is None or written is None or alike(written.shape, found.shape):
        return result
    return write.reshape(result, *found.shape) if open_among(found.shape) < 2 else None


def _axes(values: dict[str, Any], source: Tensor) -> list[int]:
    given = values.get("dim")
    given = [given] if isinstance(given, int) else given or ()
    return sorted({axis % source.dim() for axis in given}) if source.dim() else []


_NORMS: Mapping[str, _Written] = {
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "instance_norm": _instance_norm,
    "mean": _mean_of_last,
}
_REDUCTIONS: Mapping[str, _Written] = {
    "batch_norm": _batch_norm,
    "mean": _mean,
    "sum": _sum,
    "var": _variance,
    "std": _deviation,
    "linalg_vector_norm": _length,
    "linalg_norm": _length,
    "norm": _length,
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
        is_view = axes > 1 or parts > 1  # which infers one open size
        if is_view and open_among(kept) > 1:
            return None
        if not kept or not all(isinstance(size, int) for size in joined) or math.prod(joined) == 0:
            return None
        length = math.prod(joined) // parts
        if parts > 1:
            return cls(write, write.reshape(node, *kept, parts, length), length, value.shape)
        return cls(write, node if axes == 1 else write.reshape(node, *kept, length), length, value.shape)

    @classmethod
    def along(cls, write: Writer, node: fx.Node, value: Tensor, axes: list[int]) -> "_Rows | None":
        """Returns the rows along axes that follow each other; None where their length is open."""
        return cls.of(write, node, value, len(axes))

    def averages(self, data: fx.Node) -> fx.Node:
        """Returns the means of rows, one number in each."""
        return self.sums(data, 1.0 / self.length)

    def sums(self, data: fx.Node, factor: float) -> fx.Node:
        """Returns the sums of rows times a factor, one number in each."""
        column = self.write.constant(torch.full((1, self.length), factor), "mean")
        return self.write.call(_ATEN.linear.default, data, column)

    def variances(self, correction: float) -> fx.Node | None:
        """Returns the mean squares of what differs from the mean, one number in each; None where too few are there."""
        if self.length <= correction:
            return None
        apart = self.write.call(_ATEN.sub.Tensor, self.data, self.averages(self.data))
        return self.sums(self.write.call(_ATEN.mul.Tensor, apart, apart), 1.0 / (self.length - correction))

    def root(self, found: fx.Node | None) -> fx.Node | None:
        """Returns the square roots of numbers of rows."""
        return None if found is None else self.write.call(_ATEN.sqrt.default, found)

    def powers(self, power: Callable[..., Any], *, is_root: bool) -> fx.Node | None:
        """Returns the sums of powers of rows, or the roots of these."""
        found = self.sums(self.write.call(power, self.data), 1.0)
        return self.root(found) if is_root else found

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
        found = self.data if alike(written.shape, self.shape) else self.write.reshape(self.data, *self.shape)
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


class _Turned(_Rows):
    """Rows along axes in the middle, turned to the end."""

    @classmethod
    def along(cls, write: Writer, node: fx.Node, value: Tensor, axes: list[int]) -> "_Rows | None":
        """Returns [..., rows, ...] as [before, behind, rows]."""
        start, stop = axes[0], axes[-1] + 1
        joined: list[Any] = [
            math.prod(value.shape[part]) for part in (slice(start), slice(start, stop), slice(stop, None))
        ]
        if not isinstance(joined[1], int) or joined[1] == 0 or open_among(joined) > 1:
            return None
        data = node if list(value.shape) == joined else write.reshape(node, *joined)
        return cls(write, write.call(_ATEN.transpose.int, data, 1, 2), joined[1], value.shape)


class _Channels(_Rows):
    """Rows along the channels of images, which a convolution with one tap adds up."""

    @classmethod
    def along(cls, write: Writer, node: fx.Node, value: Tensor, axes: list[int]) -> "_Rows | None":
        """Returns the channels of each pixel; None where their number is open."""
        length: Any = value.shape[1]
        return cls(write, node, length, value.shape) if isinstance(length, int) and length else None

    def sums(self, data: fx.Node, factor: float) -> fx.Node:
        """Returns the sums over channels times a factor, [n, 1, height, width]."""
        taps = self.write.constant(torch.full((1, self.length, 1, 1), factor), "mean")
        return self.write.call(_ATEN.conv2d.default, data, taps)
