"""Products of batches of matrices with as many dimensions as they have, as the kernel takes them.

Before: a float graph with matmul. After: the same with an operator that nobody decomposes. ExecuTorch writes matmul as
bmm between reshapes to one dimension of batches and back, and XNNPACK reshapes to one open size at most: scores of open
length, `[batch, heads, length, length]`, would leave the delegates for that. `xnn_define_batch_matrix_multiply` takes
any dimensions of batches, and broadcasts them (XNNPACK, `src/subgraph/batch-matrix-multiply.c`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.graph.facts import tensor_value
from quantplug.lowering.rewrites.writing import Writer, done, matching

# As ExecuTorch's partitioner calls it.
NAME = "matmul.default"
# Of a tensor in XNNPACK.
_MOST_DIMENSIONS = 6
_FLOATS = (torch.float32, torch.float16)


@torch.library.custom_op("quantplug::matmul", mutates_args=())
def matmul_of_batches(first: Tensor, second: Tensor) -> Tensor:
    """Returns the products of matrices `[..., m, k]` and `[..., k, n]` whose other dimensions broadcast."""
    return torch.matmul(first, second)


@matmul_of_batches.register_fake
def _of_shapes(first: Tensor, second: Tensor) -> Tensor:
    return torch.matmul(first, second)


def products_are_of_batches(model: fx.GraphModule, taken: Callable[[fx.Node], bool] | None = None) -> fx.GraphModule:
    """Writes matmul of float tensors of three or more dimensions as the operator that the kernel is.

    Args:
        model: a graph module; it is changed in place and returned.
        taken: which nodes may be written so, None for all.
    """
    for node, values in matching(model, "matmul"):
        operands = [tensor_value(values[name]) for name in ("self", "other")]
        if all(_is_batch(value) for value in operands) and (taken is None or taken(node)):
            write = Writer(model, node)
            write.replace(write.call(torch.ops.quantplug.matmul.default, values["self"], values["other"]))
    return done(model)


def _is_batch(value: Tensor | None) -> bool:
    return value is not None and value.dtype in _FLOATS and 3 <= value.dim() <= _MOST_DIMENSIONS


def config() -> Any:
    """Returns what tells ExecuTorch's partitioner that XNNPACK takes the operator."""
    from executorch.backends.xnnpack.partition.config.generic_node_configs import BMMConfig

    class MatmulConfig(BMMConfig):
        target_name = NAME

    return MatmulConfig


def visitor(of_batches: Any) -> Any:
    """Returns what writes the operator into XNNPACK's graph: as what writes bmm does, whatever the dimensions.

    Args:
        of_batches: ExecuTorch's visitor of bmm.
    """

    class MatmulVisitor(of_batches):
        target = "quantplug.matmul.default"

    return MatmulVisitor
