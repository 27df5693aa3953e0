"""Rows that nobody reads: what is sliced off at the end is not computed in the first place.

A classifier reads one token of a transformer's last layer. Every operator that computes rows apart from each other,
up to the attention, then needs that one row.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.graph.facts import operands, operator_name, tensor_value
from quantplug.core.graph.operators import CLAMPS, COPIES, IDENTITIES, RESHAPES
from quantplug.lowering.rewrites.writing import Writer, axis_of, done, open_among, permutation

_ATEN = torch.ops.aten
_ELEMENTWISE = {
    "add", "sub", "mul", "div", "maximum", "minimum", "gelu", "silu", "sigmoid", "tanh", "hardswish", "hardsigmoid",
    "leaky_relu", "elu", "abs", "neg", "exp", "sqrt", "rsqrt", "square", *CLAMPS, *COPIES, *IDENTITIES,
}  # fmt: skip
_RESHAPES = {name.partition(".")[0] for name in RESHAPES}
# Operators that are worth it: the others only follow them, or a slice would stand between a layer and its activation.
_COSTLY = {"linear", "matmul", "bmm", "layer_norm", "softmax", "_softmax", "cat"}


@dataclass(frozen=True)
class _Rows:
    """The rows of one axis, from `start` to before `stop`, of the `size` that there are."""

    axis: int
    start: int
    stop: int
    size: int

    @property
    def are_all(self) -> bool:
        """Tells whether nothing is left out."""
        return self.stop - self.start == self.size


def unread_rows_are_not_computed(model: fx.GraphModule) -> fx.GraphModule:
    """Slices before the operators whose result is sliced, where at most half of it is read and time is saved."""
    wanted = _narrowed(model.graph)
    if any(_name(node) in _COSTLY for node in wanted):
        _write(model, wanted)
    return done(model)


def _narrowed(graph: fx.Graph) -> dict[fx.Node, _Rows]:
    """Returns the operators of which all users read the same rows, without the cheap ones at the start."""
    wanted: dict[fx.Node, _Rows] = {}
    for node in reversed(graph.nodes):
        asked = {_asked(user, node, wanted) for user in node.users}
        rows = next(iter(asked)) if len(asked) == 1 else None
        if rows is not None and _sliced(node) is None and _operands(node, rows) is not None:
            wanted[node] = rows
    for node in graph.nodes:
        if node in wanted and _name(node) not in _COSTLY and wanted.keys().isdisjoint(node.all_input_nodes):
            del wanted[node]
    return wanted


def _asked(user: fx.Node, source: fx.Node, wanted: dict[fx.Node, _Rows]) -> _Rows | None:
    """Returns the rows of an operator that one of its users reads, None for all."""
    if user in wanted:
        rows = (_operands(user, wanted[user]) or {}).get(source)
        return None if rows is None or rows.are_all else rows
    rows = _sliced(user)
    return rows if rows is not None and user.args[0] is source and 2 * (rows.stop - rows.start) <= rows.size else None


def _sliced(node: fx.Node) -> _Rows | None:
    """Returns the rows that a slice reads of its input, None for any other node."""
    if _name(node) != "slice":
        return None
    values: dict[str, Any] = operands(node)
    source = tensor_value(values["self"])
    axis = axis_of(values["dim"], source.dim()) if source is not None else 0
    size: Any = source.shape[axis] if source is not None else None
    bounds = [0 if values["start"] is None else values["start"], size if values["end"] is None else values["end"]]
    if values["step"] != 1 or not all(isinstance(number, int) for number in (size, *bounds)):
        return None
    start, stop, _ = slice(*bounds).indices(size)
    return _Rows(axis, start, stop, size)


def _name(node: fx.Node) -> str:
    return operator_name(node).removeprefix("aten::")


def _operands(node: fx.Node, rows: _Rows) -> dict[fx.Node, _Rows | None] | None:
    """Returns the rows that an operator reads of each operand to compute some of its own, None if it needs all."""
    name, result, values = _name(node), tensor_value(node), operands(node) if _name(node) else {}
    if result is None or not all(tensor_value(n) is not None for n in node.all_input_nodes):
        return None
    last = rows.axis == result.dim() - 1
    if name in _ELEMENTWISE:
        return {n: _broadcast(n, rows, result) for n in node.all_input_nodes}
    if name in _RESHAPES:
        return _alone(node, _viewed(_value(values["self"]), result, rows))
    if name in ("transpose", "permute"):
        return _alone(node, replace(rows, axis=permutation(node)[rows.axis]))
    if name == "linear":
        return None if last else _alone(node, rows, values["input"])
    if name == "layer_norm":
        within = rows.axis >= result.dim() - len(values["normalized_shape"])
        return None if within else _alone(node, rows, values["input"])
    if name in ("softmax", "_softmax"):
        return None if rows.axis == axis_of(values["dim"], result.dim()) else _alone(node, rows, values["self"])
    if name == "cat":
        return _piece(values, rows, result)
    return _of_product(values, rows, result, last=last) if name in ("matmul", "bmm") else None


def _value(node: fx.Node) -> Tensor:
    value = tensor_value(node)
    assert value is not None
    return value


def _alone(node: fx.Node, rows: _Rows | None, operand: fx.Node | None = None) -> dict[fx.Node, _Rows | None] | None:
    """Returns that one operand, by default the first, is read in part and the others whole."""
    sliced = node.all_input_nodes[0] if operand is None else operand
    whole = dict[fx.Node, _Rows | None].fromkeys(node.all_input_nodes)
    return None if rows is None else whole | {sliced: rows}


def _broadcast(operand: fx.Node, rows: _Rows, result: Tensor) -> _Rows | None:
    shape = list(_value(operand).shape)
    axis = rows.axis - (result.dim() - len(shape))
    return _Rows(axis, rows.start, rows.stop, rows.size) if axis >= 0 and shape[axis] == rows.size else None


def _viewed(source: Tensor, result: Tensor, rows: _Rows) -> _Rows | None:
    """Returns the rows of a view's input that hold the same elements, None if no axis has them side by side."""
    if open_among(result.shape) > 1:
        return None
    inner: Any = math.prod(result.shape[rows.axis + 1 :])
    for axis, size in enumerate(source.shape):
        step: Any = math.prod(source.shape[axis + 1 :])
        if not all(isinstance(number, int) for number in (inner, step, size)) or size * step != rows.size * inner:
            continue
        start, stop = rows.start * inner, rows.stop * inner
        if size > 1 and start % step == 0 and stop % step == 0:
            return _Rows(axis, start // step, stop // step, size)
    return None


def _piece(values: dict[str, Any], rows: _Rows, result: Tensor) -> dict[fx.Node, _Rows | None] | None:
    """Returns the rows of the one tensor that holds them, None if several of a concatenation's do."""
    if axis_of(values["dim"], result.dim()) != rows.axis:
        return None
    before = 0
    for tensor in values["tensors"]:
        size: Any = _value(tensor).shape[rows.axis]
        if not isinstance(size, int):
            return None
        if before <= rows.start and rows.stop <= before + size:
            return {tensor: _Rows(rows.axis, rows.start - before, rows.stop - before, size)}
        before += size
    return None


def _of_product(
    values: dict[str, Any], rows: _Rows, result: Tensor, *, last: bool
) -> dict[fx.Node, _Rows | None] | None:
    first, second = values["self"], values["other" if "other" in values else "mat2"]
    dims = {_value(first).dim(), _value(second).dim(), result.dim()}
    if len(dims) != 1 or first is second or rows.axis < result.dim() - 2:
        return None
    return {first: None, second: rows} if last else {first: rows, second: None}


def _write(model: fx.GraphModule, wanted: dict[fx.Node, _Rows]) -> None:
    made: dict[fx.Node, fx.Node] = {}
    sliced: dict[tuple[fx.Node, _Rows], fx.Node] = {}
    for node in list(model.graph.nodes):
        write, source = Writer(model, node), node.args[0] if node.args else None
        if isinstance(source, fx.Node) and source in made and _sliced(node) is not None:
            write.replace(made[source])
        elif node in wanted:
            replaced: dict[fx.Node, fx.Node] = {}
            for operand, rows in (_operands(node, wanted[node]) or {}).items():
                if rows is None:
                    continue
                if operand not in made and (operand, rows) not in sliced:
                    sliced[operand, rows] = _slice(write, operand, rows)
                replaced[operand] = made[operand] if operand in made else sliced[operand, rows]
            made[node] = _part(write, wanted[node], replaced)
    for node in reversed(made):  # a dropout is no dead code to fx, it draws random numbers
        model.graph.erase_node(node)


def _slice(write: Writer, operand: fx.Node, rows: _Rows) -> fx.Node:
    return operand if rows.are_all else write.call(_ATEN.slice.Tensor, operand, rows.axis, rows.start, rows.stop)


def _part(write: Writer, rows: _Rows, replaced: dict[fx.Node, fx.Node]) -> fx.Node:
    """Writes an operator that computes some rows of what a node computes, from parts of its operands."""
    node, result = write.node, _value(write.node)
    sizes = list(result.shape)
    sizes[rows.axis] = rows.stop - rows.start
    if _name(node) == "cat":
        return next(iter(replaced.values()))
    if _name(node) in _RESHAPES:
        return write.reshape(*replaced.values(), *sizes)
    target: Any = node.target
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda operand: replaced.get(operand, operand))
    return write.call(target, *args, **kwargs)
