"""The integer representation: operators between dequantize and quantize, computed on the integers themselves.

Before: a reference quantized model, `dequantize -> operator (-> relu or clamp) -> quantize`. After: the same
model in which integer arithmetic stands for each such piece:

    products (convolutions, linear, matmul, mul)   sum of (a - a's zero point) * (b - b's zero point), rescaled once
    sums and averages                              of values less their zero points, rescaled
    selections (max-pool, data movement)           of the integers as they are, where scales agree

and a relu or clamp is a bound on the integers. Accumulators are exact (int64: PyTorch has no int32 kernel for
some convolutions) and rescaled in float64, so the result is the correctly rounded one; float32 between dequantize
and quantize comes out one step beside it where its own error crosses a tie. Dynamic products end in float.
Operators that no integer rule knows keep their q/dq, as do convolutions with a scale for each sample.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.fx.node import map_arg

from quantplug.core.graph.editing import erase_dead_code
from quantplug.core.graph.facts import (
    attribute,
    constant_value,
    operands,
    rank,
    sole_user,
    tensor_value,
    written_argument,
)
from quantplug.core.graph.operators import ALIASES, CLAMPS, JOINS, MAXIMA, MOVES, REPEATS, overloads_of
from quantplug.core.graph.submodels import submodel_targets
from quantplug.core.graph.traits import clamp_bounds
from quantplug.core.patterns.language import op
from quantplug.core.qdq.nodes import AFFINE_OPS, DEQUANTIZE_OPS, DEQUANTIZE_ROWS

_ATEN = torch.ops.aten
_QUANTIZE = torch.ops.quantized_decomposed.quantize_per_tensor.default
_CONVOLUTIONS = op("conv1d", "conv2d", "conv3d").overloads
_TRANSPOSED = op("conv_transpose1d", "conv_transpose2d", "conv_transpose3d").overloads
_LINEAR = op("linear").overloads
_PRODUCTS = op("matmul", "bmm.default", "mm.default", "mul.Tensor", "mul_.Tensor").overloads
_SUMS = op("add.Tensor", "add_.Tensor", "sub.Tensor", "sub_.Tensor").overloads
_AVERAGES = op(
    "mean.dim", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d"
).overloads
_BOUNDS = overloads_of(CLAMPS)
_SELECTIONS = overloads_of((*MOVES, *REPEATS, *ALIASES, *JOINS, *MAXIMA))
# Attributes of an operator that the nodes in its place take over.
_META = ("nn_module_stack", "stack_trace", "from_node", "custom")


def integer_representation(model: fx.GraphModule) -> None:
    """Replaces float operators between q/dq by integer arithmetic, in place, submodels of control flow included."""
    for target in submodel_targets(model):
        integer_representation(attribute(model, target))
    # The list itself and no copy of it: it leaves out what was erased on the way.
    for node in model.graph.nodes:
        rule = _RULES.get(node.target)
        if rule is not None:
            _rewrite(_Piece.ending_behind(node), rule)
    erase_dead_code(model.graph)
    model.recompile()


@dataclass(frozen=True)
class _Piece:
    """An operator, the bound on its result, and the quantize node behind both; the latter two may be absent."""

    root: fx.Node
    bound: fx.Node | None = None
    quantize: fx.Node | None = None

    @classmethod
    def ending_behind(cls, root: fx.Node) -> "_Piece":
        reader = sole_user(root)
        bound = next((node for node in (root, reader) if clamp_bounds(node) is not None), None)
        quantize = sole_user(bound or root)
        return cls(root, bound, quantize) if quantize is not None and quantize.target is _QUANTIZE else cls(root)

    def erase(self) -> None:
        """Takes the nodes out that nothing reads any more; those that work in place would otherwise stay."""
        for node in dict.fromkeys((self.quantize, self.bound if self.quantize else None, self.root)):
            if node is not None and not node.users:
                node.graph.erase_node(node)

    def limits(self) -> tuple[int, int]:
        """The least and the greatest integer of the result; quantizing is monotone, so a bound is one of them."""
        assert self.quantize is not None
        scale, zero_point, low, high = self.quantize.args[1:5]
        least, greatest = clamp_bounds(self.bound) or (None, None)

        def integer(value: Any, otherwise: Any) -> int:
            return int(otherwise if value is None else min(max(round(value / scale) + zero_point, low), high))

        return integer(least, low), integer(greatest, high)


@dataclass(frozen=True)
class _Integers:
    """What a dequantize node reads; scale and zero point are numbers, or nodes of tensors.

    With `rows` they have the tensor's dimensions, of which the last is 1.
    """

    node: fx.Node
    scale: Any
    zero_point: Any
    axis: int | None
    rows: bool = False


def _integers(node: Any) -> _Integers | None:
    """Returns the integers behind a dequantize node, or None if a node is none."""
    if not isinstance(node, fx.Node) or node.target not in DEQUANTIZE_OPS or node.target in AFFINE_OPS:
        return None
    source, scale, zero_point, *rest = node.args
    if node.target is DEQUANTIZE_ROWS:
        return _Integers(source, scale, zero_point, None, rows=True)  # type: ignore[arg-type]
    if rest[-1].is_floating_point:  # type: ignore[union-attr]
        return None
    return _Integers(source, scale, zero_point, rest[0] if len(rest) == 4 else None)  # type: ignore[arg-type]


class _Arithmetic:
    """Writes the nodes that stand for an operator in front of it."""

    def __init__(self, origin: fx.Node) -> None:
        self._origin = origin

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self._origin.graph.inserting_before(self._origin):
            node = self._origin.graph.call_function(target, args, kwargs)
        node.meta.update({key: self._origin.meta[key] for key in _META if key in self._origin.meta})
        return node

    def double(self, node: fx.Node) -> fx.Node:
        return self(_ATEN.to.dtype, node, torch.float64)

    def centered(self, found: _Integers) -> fx.Node:
        """The integers less their zero point."""
        wide = self(_ATEN.to.dtype, found.node, torch.int64)
        known = constant_value(found.zero_point) if isinstance(found.zero_point, fx.Node) else found.zero_point
        if known is not None and not torch.as_tensor(known).any():
            return wide
        return self(_ATEN.sub.Tensor, wide, self.along(found.zero_point, found.axis, rank(found.node)))

    def along(self, number: Any, axis: int | None, dimensions: int | None) -> Any:
        """A number for each channel, shaped so that it lies along an axis; other numbers as they are."""
        if axis is None or dimensions is None:
            return number
        return self(_ATEN.view.default, number, [-1] + [1] * (dimensions - 1 - axis))

    def real(self, operand: Any) -> Any:
        """The value of an operand in float64, exact but for one rounding."""
        found = _integers(operand)
        if found is None:
            return self.double(operand) if isinstance(operand, fx.Node) else operand
        scale = self.double(found.scale) if isinstance(found.scale, fx.Node) else found.scale
        centered = self.double(self.centered(found))
        return self(_ATEN.mul.Tensor, centered, self.along(scale, found.axis, rank(found.node)))

    def scaled(self, total: fx.Node, scales: tuple[Any, ...]) -> fx.Node:
        """An accumulator in float64 times scales: their product at once where they are numbers."""
        known = [s for s in scales if not isinstance(s, fx.Node)]
        result = self.double(total)
        if len(known) == 2:
            return self(_ATEN.mul.Tensor, result, known[0] * known[1])
        for scale in scales:
            result = self(_ATEN.mul.Tensor, result, self.double(scale) if isinstance(scale, fx.Node) else scale)
        return result

    def quantized(self, real: fx.Node, piece: _Piece) -> fx.Node:
        assert piece.quantize is not None
        scale, zero_point, *_, dtype = piece.quantize.args[1:]
        steps = self(_ATEN.round.default, self(_ATEN.div.Tensor, real, scale))
        bounded = self(_ATEN.clamp.default, self(_ATEN.add.Tensor, steps, zero_point), *piece.limits())
        return self(_ATEN.to.dtype, bounded, dtype)


_Rule: TypeAlias = Callable[[_Arithmetic, _Piece], fx.Node | None]
"""Writes an operator's value in float64, or returns None where it does not apply."""


def _rewrite(piece: _Piece, rule: _Rule) -> None:
    write = _Arithmetic(piece.root)
    result = rule(write, piece)
    if result is None:
        return
    end = piece.quantize or piece.root
    if rule is not _selection:
        result = write.quantized(result, piece) if piece.quantize else _as_before(write, result, piece.root)
    result.meta = {**result.meta, "val": end.meta.get("val")}
    end.replace_all_uses_with(result)
    piece.erase()


def _as_before(write: _Arithmetic, real: fx.Node, root: fx.Node) -> fx.Node:
    value = tensor_value(root)
    return write(_ATEN.to.dtype, real, torch.float32 if value is None else value.dtype)


def _product(write: _Arithmetic, piece: _Piece) -> fx.Node | None:
    """Two tensors of integers, one scale each; the second may have one a channel if the sums keep channels apart."""
    first, second, *rest = operands(piece.root).values()
    one, other = _integers(first), _integers(second)
    if one is None or other is None or one.axis is not None or _writes_to_shared(piece.root):
        return None
    weighted = piece.root.target not in _PRODUCTS
    if other.rows or (one.rows and piece.root.target not in _LINEAR):
        return None
    if other.axis is not None and (not weighted or other.axis != _output_axis(piece.root)):
        return None
    bias, rest = (rest[0], [None, *rest[1:]]) if weighted else (None, rest)
    total = write(_functional(piece.root), write.centered(one), write.centered(other), *rest)
    channels = _channels_behind(piece.root)
    scale = other.scale if other.axis is None else write(_ATEN.view.default, other.scale, [-1] + [1] * channels)
    real = write.scaled(total, (one.scale, scale))
    if bias is None:
        return real
    return write(_ATEN.add.Tensor, real, write(_ATEN.view.default, write.real(bias), [-1] + [1] * channels))


def _output_axis(node: fx.Node) -> int | None:
    """The axis of a weight along which results are apart; grouped transposed convolutions have none."""
    if node.target in _TRANSPOSED:
        return 1 if operands(node)["groups"] == 1 else None
    return 0


def _channels_behind(node: fx.Node) -> int:
    """How many dimensions of a product come behind its channels."""
    dimensions = rank(operands(node).get("weight"))
    return 0 if node.target in _LINEAR or dimensions is None else dimensions - 2


def _sum(write: _Arithmetic, piece: _Piece) -> fx.Node | None:
    found = operands(piece.root)
    sides = [found["self"], found["other"]]
    if piece.quantize is None or _writes_to_shared(piece.root):
        return None
    if any(isinstance(side, fx.Node) and _integers(side) is None for side in sides):
        return None
    return write(_functional(piece.root), *(write.real(side) for side in sides), alpha=found["alpha"])


def _average(write: _Arithmetic, piece: _Piece) -> fx.Node | None:
    averaged, *rest = piece.root.args
    found = _integers(averaged)
    if piece.quantize is None or found is None or found.axis is not None or found.rows:
        return None
    mean = write(piece.root.target, write.double(write.centered(found)), *rest, **piece.root.kwargs)
    return write.scaled(mean, (found.scale,))


def _bound(write: _Arithmetic, piece: _Piece) -> fx.Node | None:
    source = piece.root.all_input_nodes[0]
    if piece.bound is not piece.root or _integers(source) is None or _writes_to_shared(piece.root):
        return None
    found: fx.Node = write.real(source)
    return found


def _selection(write: _Arithmetic, piece: _Piece) -> fx.Node | None:
    """Only where everything that comes together has the numbers of the result."""
    if piece.quantize is None or piece.bound is not None or written_argument(piece.root) is not None:
        return None
    tensors = [n for n in piece.root.all_input_nodes if tensor_value(n) is not None]
    if any(_integers(n) is None or n.args[1:] != piece.quantize.args[1:] for n in tensors):
        return None
    args = map_arg(piece.root.args, lambda n: n.args[0] if n in tensors else n)
    return write(piece.root.target, *args, **piece.root.kwargs)


def _writes_to_shared(node: fx.Node) -> bool:
    """Tells whether an in-place operator changes a tensor that others read too."""
    written = written_argument(node)
    return written is not None and len(written.users) > 1


def _functional(node: fx.Node) -> Any:
    """The operator of a node, or what computes the same as an in-place one."""
    if written_argument(node) is None:
        return node.target
    name, overload = str(node.target).removeprefix("aten.").split(".")
    return getattr(getattr(_ATEN, name.removesuffix("_")), overload)


_RULES: Mapping[Any, _Rule] = {
    **dict.fromkeys(_CONVOLUTIONS | _TRANSPOSED | _LINEAR | _PRODUCTS, _product),
    **dict.fromkeys(_SUMS, _sum),
    **dict.fromkeys(_AVERAGES, _average),
    **dict.fromkeys(_BOUNDS, _bound),
    **dict.fromkeys(_SELECTIONS, _selection),
}
