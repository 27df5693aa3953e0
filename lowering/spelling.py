"""A q/dq graph spelled plainly: one operator for what exports and decompositions write in several ways.

Before: `convolution`, paddings in words, products by constant matrices, poolings that also yield positions, one size
for all dimensions. After: `conv2d`, numbers, `linear`, `max_pool2d`, a size for each dimension, and the same results.
What is spelled keeps its node, its name and its metadata.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from quantplug.core.graph.editing import call, constant, erase_unused, set_operand
from quantplug.core.graph.facts import (
    compute_nodes,
    constant_value,
    is_constant,
    operands,
    operator_name,
    rank,
    tensor_value,
)
from quantplug.core.graph.traits import per_dimension, transposes
from quantplug.core.qdq.nodes import is_dequantize
from quantplug.core.qdq.qparams import DEQUANTIZE_PER_TENSOR, QD, qparams
from quantplug.lowering.sizes import write_sizes_out

_ATEN = torch.ops.aten
_CONVOLUTIONS = (_ATEN.conv1d.default, _ATEN.conv2d.default, _ATEN.conv3d.default)
_TRANSPOSED = (_ATEN.conv_transpose1d.default, _ATEN.conv_transpose2d.input, _ATEN.conv_transpose3d.input)


def spell_plainly(graph: fx.Graph) -> None:
    """Spells a graph plainly, in place; what has no plain spelling of the same results stays."""
    for node in list(compute_nodes(graph)):
        spell = _SPELLINGS.get(operator_name(node))
        if spell is not None:
            spell(node)
    write_sizes_out(graph)


def _convolution(node: fx.Node) -> None:
    given = operands(node)
    dimensions = rank(given["weight"])
    if dimensions not in (3, 4, 5):
        return
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    crossed = (*names[:5], "output_padding", "groups", "dilation")
    order = crossed if given["transposed"] else names
    target = (_TRANSPOSED if given["transposed"] else _CONVOLUTIONS)[dimensions - 3]
    node.target, node.args, node.kwargs = target, tuple(given[name] for name in order), {}


def _padded_in_words(node: fx.Node) -> None:
    given = operands(node)
    weight = tensor_value(given["weight"])
    if not isinstance(given["padding"], str) or weight is None:
        return
    padding, uneven = padding_in_numbers(given["padding"], weight.shape[2:], given["dilation"])
    source = _with_more_behind(node, given["input"], uneven) if any(uneven) else given["input"]
    if source is not None:
        args = (source, given["weight"], given["bias"], given["stride"], padding, given["dilation"], given["groups"])
        node.target, node.args, node.kwargs = _CONVOLUTIONS[len(padding) - 1], args, {}


def padding_in_numbers(padding: str, kernel: Sequence[int], dilation: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns what a padding in words puts on both sides of each dimension, and what it puts more behind it.

    Args:
        padding: "same" or "valid".
        kernel: sizes of the window.
        dilation: of each of its dimensions, or one for all.
    """
    spread = per_dimension(dilation, len(kernel))
    reach = [step * (int(size) - 1) * (padding == "same") for step, size in zip(spread, kernel, strict=True)]
    return [total // 2 for total in reach], [total % 2 for total in reach]


def _with_more_behind(node: fx.Node, source: fx.Node, uneven: list[int]) -> fx.Node | None:
    """Returns a dequantized input with one more zero behind its dimensions, or None where zero is no integer of it."""
    value = tensor_value(source)
    if source.target not in DEQUANTIZE_PER_TENSOR or value is None:
        return None
    params = qparams(source)
    if not isinstance(params.zero_point, int) or not params.quant_min <= params.zero_point <= params.quant_max:
        return None
    widths = [width for behind in reversed(uneven) for width in (0, behind)]
    integers = operands(source)["input"]
    pad = call(node, _ATEN.constant_pad_nd.default, (integers, widths, params.zero_point), integers)
    wider = call(node, source.target, (pad, *source.args[1:]), source)
    wider.kwargs = {name: given for name, given in source.kwargs.items() if name != "input"}
    # To pad the recorded value would decide how large its open sizes are.
    kept = value.shape[: -len(uneven)]
    sizes = (*kept, *(size + more for size, more in zip(value.shape[len(kept) :], uneven, strict=True)))
    wider.meta["val"] = value.new_empty(sizes)
    pad.meta["val"] = value.new_empty(sizes, dtype=params.dtype)
    return wider


def _product(node: fx.Node) -> None:
    """Writes a product by a constant matrix as a linear layer over the matrix turned."""
    given = operands(node)
    source, matrix = given.get("mat1", given["self"]), given["other" if "other" in given else "mat2"]
    bias = given["self"] if "mat1" in given else None
    value, made = tensor_value(source), tensor_value(matrix)
    if value is None or made is None or value.dim() < 2 or made.dim() != 2 or not _adds_a_row(given, bias, made):
        return
    weight = _turned(node, matrix)
    if weight is None:
        return
    node.target, node.args, node.kwargs = _ATEN.linear.default, (source, weight, bias), {}
    erase_unused((matrix,))


def _adds_a_row(given: Mapping[str, Any], bias: Any, matrix: torch.Tensor) -> bool:
    """Tells whether nothing is added, or one number for each column and nothing scaled."""
    if bias is None:
        return True
    row = tensor_value(bias)
    is_row = row is not None and row.dim() == 1 and row.shape == matrix.shape[1:]
    return is_row and (given["beta"], given["alpha"]) == (1, 1)


def _turned(node: fx.Node, matrix: fx.Node) -> fx.Node | None:
    """Returns the constant of which a matrix is the transpose, or None where it is none."""
    if transposes(matrix):
        inner = operands(matrix)
        source = inner["self"]
        return source if _swaps(inner) and (is_constant(source) or _integers(source) is not None) else None
    return _dequantized_turned(node, matrix)


def _swaps(given: Mapping[str, Any]) -> bool:
    """Tells whether a transposition of a matrix swaps its two axes."""
    if "dims" in given:
        return [axis % 2 for axis in given["dims"]] == [1, 0]
    return bool((given.get("dim0", 0) - given.get("dim1", 1)) % 2)


def _integers(matrix: Any) -> torch.Tensor | None:
    """Returns the constant behind a dequantize node."""
    if not is_dequantize(matrix):
        return None
    source = operands(matrix).get("input")
    return constant_value(source) if is_constant(source) else None


def _dequantized_turned(node: fx.Node, matrix: fx.Node) -> fx.Node | None:
    """Returns a dequantize node of the transposed integers; scales by channel keep their channels."""
    integers, owner, value = _integers(matrix), node.graph.owning_module, tensor_value(matrix)
    by_channel = matrix.target is QD.dequantize_per_channel.default
    if integers is None or owner is None or value is None or not (by_channel or matrix.target in DEQUANTIZE_PER_TENSOR):
        return None
    stored = constant(matrix, f"{operands(matrix)['input'].target}_turned", integers.detach().t().contiguous())
    weight = call(matrix, matrix.target, matrix.args, matrix)
    weight.kwargs = dict(matrix.kwargs)
    set_operand(weight, "input", stored)
    if by_channel:
        set_operand(weight, "axis", 1 - operands(matrix)["axis"] % 2)
    weight.meta["val"] = value.t().contiguous()
    return weight


def _pooling(node: fx.Node) -> None:
    """Drops the positions of maxima that nobody reads, and writes out a stride that is the window."""
    users = list(node.users)
    name = operator_name(node).removesuffix("_with_indices")
    if name != operator_name(node):
        if any(user.target is not operator.getitem or (user.args[1] != 0 and user.users) for user in users):
            return
        given = operands(node)
        _leave_the_maxima(node, users)
        node.target = getattr(_ATEN, name.removeprefix("aten::")).default
        names = ("self", "kernel_size", "stride", "padding", "dilation", "ceil_mode")
        node.args, node.kwargs = tuple(given[name] for name in names), {}
    if not operands(node)["stride"]:
        set_operand(node, "stride", operands(node)["kernel_size"])


def _leave_the_maxima(node: fx.Node, users: list[fx.Node]) -> None:
    for user in users:
        if user.args[1] == 0:
            user.replace_all_uses_with(node)
        node.graph.erase_node(user)
    node.meta["val"] = node.meta["val"][0]


def _maximum(node: fx.Node) -> None:
    """Counts the dimension of a maximum from the front."""
    given = operands(node)
    dimensions = rank(given["self"])
    if "dim" in given and dimensions:
        set_operand(node, "dim", given["dim"] % dimensions)


_SPELLINGS: Mapping[str, Callable[[fx.Node], None]] = MappingProxyType(
    {
        "aten::convolution": _convolution,
        "aten::max": _maximum,
        **{f"aten::conv{dimensions}d": _padded_in_words for dimensions in (1, 2, 3)},
        **dict.fromkeys(("aten::addmm", "aten::mm", "aten::matmul"), _product),
        **{
            f"aten::{kind}_pool{dimensions}d{suffix}": _pooling
            for kind, suffix in (("max", ""), ("max", "_with_indices"), ("avg", ""))
            for dimensions in (1, 2, 3)
        },
    }
)
