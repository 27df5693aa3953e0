"""Products by a constant matrix as linear layers."""

from typing import Any

import torch
from torch import Tensor, fx, nn

from quantplug.core.graph.facts import tensor_value
from quantplug.lowering.rewrites.writing import Writer, constant_operand, done, matching

_ATEN = torch.ops.aten


def products_are_linear(model: fx.GraphModule) -> fx.GraphModule:
    """Writes addmm, mm and matmul by a constant matrix as linear, the only one of them with integer kernels."""
    for node, values in matching(model, "addmm", "mm", "matmul"):
        matrix = constant_operand(values.get("mat2", values.get("other")))
        source = values.get("mat1", values["self"])
        bias = values["self"] if "mat1" in values else None
        if matrix is None or matrix.dim() != 2 or not _adds_a_row(values, bias, matrix):
            continue
        value = tensor_value(source)
        if value is None or value.dim() < 2:
            continue
        write = Writer(model, node)
        weight = matrix.detach().t().contiguous()
        held = write.constant(nn.Parameter(weight) if isinstance(matrix, nn.Parameter) else weight, "matrix")
        write.replace(write.call(_ATEN.linear.default, source, held, bias))
    return done(model)


def _adds_a_row(values: dict[str, Any], bias: Any, matrix: Tensor) -> bool:
    """Tells whether nothing is added, or one constant number for each column and nothing scaled."""
    if bias is None:
        return True
    row = constant_operand(bias)
    return row is not None and row.shape == matrix.shape[1:] and (values["beta"], values["alpha"]) == (1, 1)
