"""Products by a constant matrix as linear layers, and parts of rows in another order as such products."""

from typing import Any

import torch
from torch import Tensor, fx, nn

from quantplug.core.graph.facts import operands, operator_name, tensor_value
from quantplug.core.graph.operators import TRANSPOSES, schema_names
from quantplug.lowering.rewrites.writing import Writer, axis_of, constant_operand, done, matching

_ATEN = torch.ops.aten
_TRANSPOSES = schema_names(TRANSPOSES)


def products_are_linear(model: fx.GraphModule) -> fx.GraphModule:
    """Writes addmm, mm and matmul by a constant matrix as linear, the only one of them with integer kernels."""
    for node, values in matching(model, "addmm", "mm", "matmul"):
        second = values.get("mat2", values.get("other"))
        turned = _before_turning(second)
        matrix = constant_operand(second) if turned is None else tensor_value(second)
        source = values.get("mat1", values["self"])
        bias = values["self"] if "mat1" in values else None
        if matrix is None or matrix.dim() != 2 or not _adds_a_row(values, bias, matrix):
            continue
        value = tensor_value(source)
        if value is None or value.dim() < 2:
            continue
        write = Writer(model, node)
        write.replace(write.call(_ATEN.linear.default, source, turned or _turned(write, matrix), bias))
    return done(model)


def _before_turning(node: Any) -> fx.Node | None:
    """Returns the constant matrix that an operand is the transpose of, None where it is none."""
    if operator_name(node) not in _TRANSPOSES:
        return None
    source: fx.Node = operands(node)["self"]
    held, seen = constant_operand(source), tensor_value(node)
    if held is None or seen is None or held.dim() != 2:
        return None
    return source if (seen.shape, seen.stride()) == (held.t().shape, held.t().stride()) else None


def _turned(write: Writer, matrix: Tensor) -> fx.Node:
    weight = matrix.detach().t().contiguous()
    return write.constant(nn.Parameter(weight) if isinstance(matrix, nn.Parameter) else weight, "matrix")


def _adds_a_row(values: dict[str, Any], bias: Any, matrix: Tensor) -> bool:
    """Tells whether nothing is added, or one constant number for each column and nothing scaled."""
    if bias is None:
        return True
    row = constant_operand(bias)
    return row is not None and row.shape == matrix.shape[1:] and (values["beta"], values["alpha"]) == (1, 1)


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


def turned_parts_are_products(model: fx.GraphModule) -> fx.GraphModule:
    """Writes parts of rows that are joined again in another order, some negated, as a product by a constant matrix.

    Rotary positions turn halves of heads so. XNNPACK slices tensors whose sizes are known; where the length of a
    sequence is open, the slices would stand outside of its delegates. The product is exact: all but one of the terms
    of each sum are zeros.
    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    """
    for node, values in matching(model, "cat"):
        parts = [_part(part) for part in values["tensors"]]
        sources = {part[0] for part in parts if part is not None}
        value = tensor_value(next(iter(sources))) if len(sources) == 1 and None not in parts else None
        if value is None or not _is_row_of_open_tensor(value) or axis_of(values["dim"], value.dim()) != value.dim() - 1:
            continue
        unit = torch.eye(int(value.shape[-1]), dtype=value.dtype)
        matrix = torch.cat([sign * unit[start:end] for _, sign, start, end in filter(None, parts)])
        write = Writer(model, node)
        write.replace(write.call(_ATEN.linear.default, sources.pop(), write.constant(matrix, "turned")))
    return done(model)


def _part(node: Any) -> tuple[fx.Node, float, int, int] | None:
    """Returns the tensor that a node has a part of, with which sign, and from where to where along its last axis."""
    sign = -1.0 if operator_name(node) == "aten::neg" else 1.0
    node = operands(node)["self"] if sign < 0 else node
    if operator_name(node) != "aten::slice":
        value = tensor_value(node)
        is_known = value is not None and value.dim() > 0 and isinstance(value.shape[-1], int)
        return (node, sign, 0, int(value.shape[-1])) if value is not None and is_known else None
    given = operands(node)
    value = tensor_value(given["self"])
    if value is None or axis_of(given["dim"], value.dim()) != value.dim() - 1 or given["step"] != 1:
        return None
    start, end, length = given["start"] or 0, given["end"], value.shape[-1]
    if not all(isinstance(number, int) for number in (start, length)) or not isinstance(end, int | None):
        return None
    start, end, _ = slice(start, end).indices(length)
    return given["self"], sign, start, end


def _is_row_of_open_tensor(value: Tensor) -> bool:
    return value.dtype == torch.float32 and value.dim() > 1 and not all(isinstance(size, int) for size in value.shape)
