"""Quantized embedding tables read row by row.

Before: dequantize_per_channel(table) -> embedding, which would make the whole table float at every call, and which
ends the process where zero points are float (torchao's `EmbeddingQuantizer`; the portable kernel takes int64).
After: `embedding_byte`, ExecuTorch's portable kernel that dequantizes only the rows that it is asked for.
"""

import torch
from torch import fx

from quantplug.core.graph.editing import add_constant, erase_dead_code
from quantplug.core.graph.facts import constant_value, operands, operator_name
from quantplug.core.qdq.nodes import is_dequantize

# The kernel's rows have one scale each, and its integers one byte.
_ROWS = 0
_BYTES = (torch.int8, torch.uint8)


def read_tables_by_row(working: fx.GraphModule) -> None:
    """Replaces embeddings of quantized tables by the kernel that reads integers, in place; names are kept."""
    import executorch.exir.passes.quant_fusion_pass  # noqa: F401  registers embedding_byte

    for node in list(working.graph.nodes):
        if operator_name(node) == "aten::embedding" and _is_table(operands(node)["weight"]):
            _replace(working, node)
    erase_dead_code(working.graph)


def _is_table(weight: fx.Node) -> bool:
    if not is_dequantize(weight) or operator_name(weight) != "quantized_decomposed::dequantize_per_channel":
        return False
    return bool(weight.args[3] == _ROWS) and weight.args[6] in _BYTES and weight.kwargs.get("out_dtype") is None


def _replace(working: fx.GraphModule, node: fx.Node) -> None:
    found = operands(node)
    table, scales, zero_points, _, low, high, _ = found["weight"].args
    offsets = constant_value(zero_points)
    if offsets is not None:
        with working.graph.inserting_before(node):
            # The kernel takes zero points in the type of the scales.
            zero_points = add_constant(working, working.graph, offsets.float(), f"{node.name}_zero_points")
    node.target = torch.ops.quantized_decomposed.embedding_byte.default
    node.args, node.kwargs = (table, scales, zero_points, low, high, found["indices"]), {}
