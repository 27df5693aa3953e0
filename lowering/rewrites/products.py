"""Products by a constant matrix as linear layers, and parts of layers as layers."""

from typing import Any

import torch
from torch import Tensor, fx, nn

from quantplug.core.graph.constants import computed
from quantplug.core.graph.editing import call_like
from quantplug.core.graph.facts import (
    constant_value,
    operands,
    operator_name,
    rank,
    sizes_of,
    sole_user,
    tensor_value,
)
from quantplug.core.graph.operators import ALIASES, COPIES, PERMUTATIONS, overloads_of
from quantplug.lowering.rewrites.writing import Writer, axis_of, constant_operand, done, matching, open_among, value_of

_ATEN = torch.ops.aten
# What a matrix may pass on the way to a product: its numbers stay what they are.
_SAME_NUMBERS = overloads_of((*PERMUTATIONS, *COPIES, *ALIASES))


def products_are_linear(model: fx.GraphModule) -> fx.GraphModule:
    """Writes addmm, mm and matmul by a constant matrix as linear, the only one of them with integer kernels.

    The transpose of a parameter is read as the parameter. Nodes keep their names.
    """
    for node, given in matching(model, "mm", "matmul"):
        _turn_if_in_front(model, node, given)
    for node, values in matching(model, "addmm", "mm", "matmul"):
        source = values.get("mat1", values["self"])
        bias = values["self"] if "mat1" in values else None
        matrix, is_turned = _matrix(values.get("mat2", values.get("other")))
        value, wide = tensor_value(source), tensor_value(matrix)
        if value is None or value.dim() < 2 or wide is None:
            continue
        width = int(wide.shape[0 if is_turned else 1])
        if not _adds_a_row(values, bias, width):
            continue
        weight = matrix if is_turned else _turned(Writer(model, node), matrix)
        node.target, node.args, node.kwargs = _ATEN.linear.default, (source, weight, bias), {}
        _take_sum_as_bias(node, width)
    return done(model)


def _turn_if_in_front(model: fx.GraphModule, node: fx.Node, values: dict[str, Any]) -> None:
    """Writes a constant matrix times a tensor as the turned tensor times the turned matrix, turned back.

    Mixers of tokens and state space models (Gu and Dao, "Mamba", arXiv:2312.00752) have such layers.
    """
    matrix, other = values["self"], values.get("mat2", values.get("other"))
    value, found = tensor_value(other), tensor_value(node)
    if _matrix(matrix)[0] is None or _matrix(other)[0] is not None or value is None or found is None or value.dim() < 2:
        return
    write, users = Writer(model, node), list(node.users)
    turned = [write.call(_ATEN.transpose.int, part, -2, -1) for part in (other, matrix)]
    node.target, node.args, node.kwargs = _ATEN.matmul.default, tuple(turned), {}
    with model.graph.inserting_after(node):
        back = call_like(model.graph, node, _ATEN.transpose.int, node, -2, -1)
    back.meta["val"] = found
    node.meta["val"] = computed(node, value_of)
    for user in users:
        user.replace_input_with(node, back)


def _matrix(node: Any) -> tuple[Any, bool]:
    """Returns the constant matrix that an operand is a view of, None if there is none, and whether it is turned."""
    is_turned = False
    while isinstance(node, fx.Node) and rank(node) == 2:
        if constant_operand(node) is not None:
            return node, is_turned
        if node.target not in _SAME_NUMBERS:
            break
        is_turned ^= tuple(computed(node, lambda _: torch.empty(2, 3)).shape) == (3, 2)
        node = node.args[0]
    return None, False


def _turned(write: Writer, matrix: fx.Node) -> fx.Node:
    value = constant_value(matrix)
    assert value is not None
    weight = value.detach().t().contiguous()
    return write.constant(nn.Parameter(weight) if isinstance(value, nn.Parameter) else weight, "matrix")


def _adds_a_row(values: dict[str, Any], bias: Any, width: int) -> bool:
    """Tells whether nothing is added, or one constant number for each column and nothing scaled."""
    return bias is None or (_is_row(bias, width) and (values["beta"], values["alpha"]) == (1, 1))


def _is_row(node: Any, width: int) -> bool:
    row = constant_operand(node)
    return row is not None and row.shape == (width,)


def _take_sum_as_bias(layer: fx.Node, width: int) -> None:
    """Gives a layer without bias the constant row that is added to its result."""
    user = sole_user(layer)
    if layer.args[2] is not None or user is None or operator_name(user) not in ("aten::add", "aten::add_"):
        return
    given = operands(user)
    row = given["other"] if given["self"] is layer else given["self"]
    if given["alpha"] != 1 or not _is_row(row, width):
        return
    if layer < row:
        layer.prepend(row)
    layer.args = (*layer.args[:2], row)
    user.replace_all_uses_with(layer)
    layer.graph.erase_node(user)


def parts_of_open_layers_are_layers(model: fx.GraphModule) -> fx.GraphModule:
    """Writes slices of a layer's channels as layers of their own, where a size is open and nothing else reads them.

    Queries, keys, values and gates come so from one layer, and parts of parts. XNNPACK slices tensors whose sizes are
    known; others would be sliced outside of its delegates. The weights are parts of one.
    """
    waiting = [node for node, _ in matching(model, "linear")]
    while waiting:
        layer = waiting.pop()
        given, whole = operands(layer), _viewed(layer)
        value, constants = tensor_value(whole), [each for each in (given["weight"], given["bias"]) if each is not None]
        parts = [_part(user) if operator_name(user) == "aten::slice" else None for user in whole.users]
        if value is None or not _is_row_of_open_tensor(value) or None in map(constant_operand, constants):
            continue
        if not all(part is not None and part[0] is whole for part in parts):
            continue
        for user, (_, start, end) in zip(list(whole.users), filter(None, parts), strict=True):
            write = Writer(model, user)
            rows = [_rows(write, operand, start, end) for operand in constants]
            part = write.call(_ATEN.linear.default, given["input"], *rows)
            waiting.append(part)
            write.replace(part if whole is layer else write.reshape(part, *sizes_of(user)))
    return done(model)


def _viewed(layer: fx.Node) -> fx.Node:
    """Returns the view of a layer's result that is all that is read of it, if it keeps rows, else the layer."""
    view = sole_user(layer)
    if view is None or operator_name(view) != "aten::reshape":
        return layer
    sizes = sizes_of(view)
    is_plain = open_among(sizes) <= 1
    return view if is_plain and sizes[-1:] == sizes_of(layer)[-1:] else layer


def _rows(write: Writer, operand: fx.Node, start: int, end: int) -> fx.Node:
    """Returns a constant of some rows of one, which is a parameter if that is one."""
    value = constant_value(operand)
    assert value is not None
    rows = value.detach()[start:end]
    return write.constant(nn.Parameter(rows) if isinstance(value, nn.Parameter) else rows, "rows")


def products_are_batches(model: fx.GraphModule) -> fx.GraphModule:
    """Writes matmul of two tensors of as many dimensions, three or more, as a product of batches of matrices."""
    for node, values in matching(model, "matmul"):
        parts = [tensor_value(values[name]) for name in ("self", "other")]
        first, second = (() if part is None else tuple(part.shape) for part in parts)
        if len(first) < 3 or first[:-2] != second[:-2]:
            continue
        write = Writer(model, node)
        if len(first) == 3:
            write.replace(write.call(_ATEN.bmm.default, values["self"], values["other"]))
            continue
        flat = [write.reshape(values[name], -1, *shape[-2:]) for name, shape in (("self", first), ("other", second))]
        product = write.call(_ATEN.bmm.default, *flat)
        write.replace(write.reshape(product, *first[:-1], second[-1]))
    return done(model)


def _part(node: fx.Node) -> tuple[fx.Node, int, int] | None:
    """Returns the tensor that a slice has a part of, and from where to where along its last axis."""
    given = operands(node)
    value = tensor_value(given["self"])
    if value is None or axis_of(given["dim"], value.dim()) != value.dim() - 1 or given["step"] != 1:
        return None
    start, end, length = given["start"] or 0, given["end"], value.shape[-1]
    if not all(isinstance(number, int) for number in (start, length)) or not isinstance(end, int | None):
        return None
    start, end, _ = slice(start, end).indices(length)
    return given["self"], start, end


def _is_row_of_open_tensor(value: Tensor) -> bool:
    return value.dtype == torch.float32 and value.dim() > 1 and not all(isinstance(size, int) for size in value.shape)
