"""Graphs of models whose weights are torchao's quantized tensors, spelled as q/dq graphs.

Before: what export writes of a model that `torchao.quantization.quantize_` changed: parts of a tensor subclass are
taken out of it, and layers of `Int8Tensor` (torchao 0.18, `quantize_/workflows/int8/int8_tensor.py`) are products of
integers, or of floats and integers, that are scaled behind. After: parts are constants, and such layers are linear
layers that read a dequantize node of the weight and, where activations are quantized, one of these.
"""

from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.graph.constants import expression_value
from quantplug.core.graph.editing import call, constant, replace, set_operand
from quantplug.core.graph.facts import held_tensor, operands, operator_name, sizes_of, tensor_value
from quantplug.core.graph.working_copy import over_same_tensors
from quantplug.core.patterns.language import Match, Op, Pattern, either, op, value
from quantplug.core.patterns.language import constant as a_constant
from quantplug.core.patterns.rules import Rule, apply
from quantplug.core.qdq.nodes import is_dequantize, is_quantize

_ATEN, _QD = torch.ops.aten, torch.ops.quantized_decomposed
_PARTS = "export::access_subclass_inner_tensor"
_CHECKS = "aten::_assert_tensor_metadata"


def plain_tensors(model: fx.GraphModule) -> fx.GraphModule:
    """Returns a model whose graph has no tensor subclasses: itself, or a copy over the same parameters."""
    if not any(operator_name(node) == _PARTS for node in model.graph.nodes):
        return model
    copied = over_same_tensors(model)
    spell_quantized_tensors(copied.graph)
    copied.recompile()
    return copied


def spell_quantized_tensors(graph: fx.Graph, *, integer_products: bool = True) -> None:
    """Spells layers of torchao's quantized tensors as q/dq graphs do, in place; other graphs stay as they are.

    Args:
        graph: of a module that holds the tensors.
        integer_products: whether layers of quantized activations are spelled so, which are products of integers.
    """
    if not any(operator_name(node) == _PARTS for node in graph.nodes):
        return
    for node in list(graph.nodes):
        if operator_name(node) == _CHECKS and not node.users:
            graph.erase_node(node)
        elif operator_name(node) == _PARTS:
            _take_out(node)
        elif operator_name(node) == "aten::to" and _keeps_dtype(node):
            replace(node, node.all_input_nodes[0])
        elif operator_name(node) == "torchao::dequantize_affine":
            _write_ends(node)
            _spell_rows(node)
    apply(graph, _LAYERS if integer_products else _LAYERS_OF_FLOATS, backwards=True)


def _write_ends(dequantize: fx.Node) -> None:
    """Writes the ends of all integers of a dtype, which torchao leaves out, as q/dq graphs have them."""
    given: dict[str, Any] = operands(dequantize)
    for name, end in zip(("quant_min", "quant_max"), _ends(given["input_dtype"]), strict=True):
        if given.get(name) is None:
            set_operand(dequantize, name, end)


def _held(node: Any) -> Tensor | None:
    return held_tensor(node) if isinstance(node, fx.Node) else None


def _spell_rows(dequantize: fx.Node) -> None:
    """Puts torchao's operator of channels in the place of that of blocks, where a block is a row of a stored weight."""
    given: dict[str, Any] = operands(dequantize)
    weight, scale, zero_point = (_held(given[name]) for name in ("input", "scale", "zero_point"))
    is_of_rows = weight is not None and list(given["block_size"]) == [1, *weight.shape[1:]]
    if weight is None or scale is None or not is_of_rows:
        return
    numbers = (scale, torch.zeros(1) if zero_point is None else zero_point)
    rows = [each.detach().flatten().expand(len(weight)).clone() for each in numbers]
    held = [constant(dequantize, "rows", each) for each in (rows[0].float(), rows[1].long())]
    tail = (0, given["quant_min"], given["quant_max"], given["input_dtype"])
    found = call(dequantize, _QD.dequantize_per_channel.default, (given["input"], *held, *tail), dequantize)
    replace(dequantize, found)


def _keeps_dtype(cast: fx.Node) -> bool:
    before, after = tensor_value(cast.all_input_nodes[0]), tensor_value(cast)
    return cast.target is _ATEN.to.dtype and before is not None and after is not None and before.dtype == after.dtype


def _take_out(node: fx.Node) -> None:
    """Puts a part of a tensor subclass in the place of the node that takes it out."""
    source, name = node.all_input_nodes[0], node.args[1]
    part = getattr(held_tensor(source), str(name), None)
    if isinstance(part, Tensor):
        replace(node, constant(node, f"{source.target}_{name}".replace(".", "_"), part.detach()))


def _cast(inner: Pattern) -> Pattern:
    return either(op("to.dtype", self=inner), inner)


def _rows(inner: Pattern) -> Pattern:
    return either(op("reshape", "view", self=inner), inner)


def _linear(match: Match) -> fx.Node | str:
    x, root, bias = match["x"], match.root, match.get("bias")
    if isinstance(bias, fx.Node) and sizes_of(bias) != (sizes_of(match["weight"])[0],):
        return "what is added is no bias"
    if "scale" in match and not (is_quantize(x) and match["scale"] is operands(x).get("scale")):
        return "its activations are not quantized by the scale behind the product"
    weight = _read_weight(match)
    if isinstance(weight, str):
        return weight
    return _shaped(root, _dequantized(x, root) if "scale" in match else x, weight, bias)


def _read_weight(match: Match) -> fx.Node | str:
    """Returns what dequantizes a weight whose scales the product has behind it, or has in front of it."""
    weight, root = match["weight"], match.root
    if "weight_scale" not in match:
        return weight if is_dequantize(weight) else "its weight is not dequantized"
    integers, scale = held_tensor(weight), expression_value(match["weight_scale"])
    if integers is None or integers.dtype != torch.int8 or scale is None or scale.numel() not in (1, len(integers)):
        return "its weight is no int8 with a scale for each row"
    scales = constant(root, "weight_scale", scale.detach().flatten().expand(len(integers)).clone())
    zeros = constant(root, "weight_zero_point", torch.zeros(len(integers), dtype=torch.int64))
    tail = (0, *_ends(torch.int8), torch.int8)
    return call(root, _QD.dequantize_per_channel.default, (weight, scales, zeros, *tail), weight, torch.float32)


def _shaped(root: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None) -> fx.Node:
    """Returns the linear layer in the place of a root, which may be of another shape, that of rows."""
    found = call(root, _ATEN.linear.default, (x, weight, bias), root)
    wanted, given = tensor_value(root), tensor_value(x)
    if wanted is None or given is None or wanted.dim() == given.dim():
        return found
    found.meta["val"] = wanted.new_empty((*given.shape[:-1], wanted.shape[-1]))
    return call(root, _ATEN.reshape.default, (found, list(wanted.shape)), root)


def _dequantized(quantize: fx.Node, root: fx.Node) -> fx.Node:
    given: dict[str, Any] = operands(quantize)
    names = ("block_size", "scale", "zero_point", "output_dtype", "quant_min", "quant_max")
    args = (quantize, *(given[name] for name in names))
    return call(root, torch.ops.torchao.dequantize_affine.default, args, quantize.all_input_nodes[0], torch.float32)


def _ends(dtype: torch.dtype) -> tuple[int, int]:
    held = torch.iinfo(dtype)
    return held.min, held.max


def _rules(product: Op) -> tuple[Rule, ...]:
    """Returns the rules for a product of rows, of another shape behind it, and with a bias."""
    with_bias = op("add", self=_rows(product), other=a_constant("bias"))
    return tuple(Rule(pattern, _linear) for pattern in (with_bias, op("reshape", "view", self=product), product))


def _scaled(product: Pattern) -> Op:
    return op("mul.Tensor", self=product, other=value("weight_scale"))


_WEIGHT = op("t", self=a_constant("weight"))
_OF_FLOATS = op("mm", self=_rows(value("x")), mat2=_cast(_WEIGHT))
_AS_UINT8 = op("to.dtype", self=op("add", self=op("to.dtype", self=_rows(value("x"))), other=128))
_SUM = either(
    op("_int_mm", self=_rows(value("x")), mat2=_WEIGHT),
    # On processors with VNNI and without AMX (`torchao.kernel.intmm`): activations 128 higher, and what that adds.
    op(
        "sub",
        self=op("_int_mm", self=_AS_UINT8, mat2=_WEIGHT),
        other=op("mul.Tensor", self=op("sum", self=_WEIGHT), other=128),
    ),
)
_OF_INTEGERS = op("mul.Tensor", self=_cast(_SUM), other=_cast(_rows(value("scale"))))
_DEQUANTIZED_BEFORE = op("mm", self=_rows(value("x")), mat2=op("t", self=value("weight")))
_LAYERS_OF_FLOATS = (*_rules(_scaled(_OF_FLOATS)), *_rules(_DEQUANTIZED_BEFORE))
_LAYERS = (*_LAYERS_OF_FLOATS, *_rules(_scaled(_cast(_OF_INTEGERS))))
