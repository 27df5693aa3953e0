"""Quantize and dequantize nodes of a graph: which nodes are such, of what kind, and with numbers of what form."""

from typing import Any, TypeGuard

import torch
import torchao.quantization.pt2e  # noqa: F401  (registers the operators of quantized_decomposed)
from torch import fx

from quantplug.core.graph.facts import is_constant, operands, operator_name, tensor_value

_QDQ_LIBRARIES = ("quantized_decomposed", "torchao")
_OPS = torch.ops.quantized_decomposed
CHOOSE_ROWS = _OPS.choose_qparams_per_token_asymmetric.default
QUANTIZE_ROWS = _OPS.quantize_per_token.default
DEQUANTIZE_ROWS = _OPS.dequantize_per_token.default
QUANTIZE_OPS = (
    _OPS.quantize_per_tensor.default,
    _OPS.quantize_per_tensor.tensor,
    _OPS.quantize_per_channel.default,
    QUANTIZE_ROWS,
    torch.ops.torchao.quantize_affine,
    torch.ops.torchao.quantize_affine.default,
)
DEQUANTIZE_OPS = (
    _OPS.dequantize_per_tensor.default,
    _OPS.dequantize_per_tensor.tensor,
    _OPS.dequantize_per_channel.default,
    DEQUANTIZE_ROWS,
    torch.ops.torchao.dequantize_affine,
    torch.ops.torchao.dequantize_affine.default,
)
AFFINE_OPS = tuple(op for op in (*QUANTIZE_OPS, *DEQUANTIZE_OPS) if "affine" in str(op))
CHOOSE_OPS = (
    _OPS.choose_qparams.tensor,
    _OPS.choose_qparams_symmetric.tensor,
    CHOOSE_ROWS,
    torch.ops.torchao.choose_qparams_affine,
    torch.ops.torchao.choose_qparams_affine.default,
)
CAST_OP = _OPS.convert_element_type.no_fuse


def is_qdq(node: Any) -> TypeGuard[fx.Node]:
    """Tells whether a node quantizes, dequantizes or chooses qparams, in whichever of the peers' dialects."""
    return operator_name(node).partition("::")[0] in _QDQ_LIBRARIES


def is_quantize(node: Any) -> TypeGuard[fx.Node]:
    """Tells whether a value is a quantize node."""
    return _named(node, "quantize")


def is_dequantize(node: Any) -> TypeGuard[fx.Node]:
    """Tells whether a value is a dequantize node."""
    return _named(node, "dequantize")


def _named(node: Any, prefix: str) -> TypeGuard[fx.Node]:
    library, _, name = operator_name(node).partition("::")
    return library in _QDQ_LIBRARIES and name.startswith(prefix)


def is_weight(node: fx.Node) -> bool:
    """Tells whether a node dequantizes a constant."""
    return is_dequantize(node) and is_constant(node.args[0])


def is_dynamic(node: fx.Node) -> bool:
    """Tells whether the qparams of a quantize or dequantize node are found at run time."""
    given = operands(node)
    scale = given.get("scale", given.get("scales"))
    return isinstance(scale, fx.Node) and not is_constant(scale)


def stored_dtype(node: fx.Node) -> torch.dtype | None:
    """Returns the integers' dtype of a quantize or dequantize node, None where it names none."""
    given = operands(node)
    found = given.get("dtype", given.get("output_dtype" if is_quantize(node) else "input_dtype"))
    return found if isinstance(found, torch.dtype) else None


def range_of(node: fx.Node) -> str:
    """Returns for what a quantize or dequantize node has a scale each: "per row", "per channel", ...; "" for one."""
    name, block = str(node.target), operands(node).get("block_size")
    if "per_token" in name:
        return "per row"
    if block is not None and is_dynamic(node):
        return _blocks(node, block)
    return "per channel" if "per_channel" in name else "per group" if "group" in name or block is not None else ""


def _blocks(node: fx.Node, block: list[Any]) -> str:
    """Returns which part of a tensor is a block; sizes that are open are whole in each."""
    value = next((v for v in map(tensor_value, (node, *node.all_input_nodes[:1])) if v is not None), None)
    sizes = [None] * len(block) if value is None else [s if isinstance(s, int) else None for s in value.shape]
    whole = [
        isinstance(given, fx.Node) or given == size or (size is None and given != 1)
        for given, size in zip(block, sizes, strict=True)
    ]
    is_row = whole[-1] and all(given == 1 for given in block[:-1])
    is_sample = all(whole[1:]) and block[0] == 1
    if is_sample and (len(block) == 4 or not is_row):  # images, even of one row
        return "per sample"
    return "per row" if is_row else "per group"


def is_conversion(node: Any) -> TypeGuard[fx.Node]:
    """Tells whether a node quantizes, dequantizes or chooses quantization parameters."""
    name = operator_name(node)
    return is_quantize(node) or is_dequantize(node) or name.partition("::")[2].startswith("choose_qparams")
