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
from quantplug.core.graph.editing import call, constant, replace
from quantplug.core.graph.facts import held_tensor, operands, operator_name, sizes_of, tensor_value
from quantplug.core.graph.working_copy import over_same_tensors
from quantplug.core.patterns.language import Match, Pattern, either, op, value
from quantplug.core.patterns.language import constant as a_constant
from quantplug.core.patterns.rules import Rule, apply
from quantplug.core.qdq.nodes import is_quantize

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
    apply(graph, _LAYERS if integer_products else _LAYERS_OF_FLOATS, backwards=True)


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
    x, weight, root = match["x"], match["weight"], match.root
    integers, scale = held_tensor(weight), expression_value(match["weight_scale"])
    if integers is None or integers.dtype != torch.int8 or scale is None or scale.numel() != len(integers):
        return "its weight is no int8 with a scale for each row"
    is_dynamic = "scale" in match
    if is_dynamic and not (is_quantize(x) and match["scale"] is operands(x).get("scale")):
        return "its activations are not quantized by the scale behind the product"
    bias = match.get("bias")
    if isinstance(bias, fx.Node) and sizes_of(bias) != (len(integers),):
        return "what is added is no bias"
    dequantized = _dequantized(match["x"], root) if is_dynamic else x
    scales = constant(root, "weight_scale", scale.detach().flatten())
    zeros = constant(root, "weight_zero_point", torch.zeros(len(integers), dtype=torch.int64))
    tail = (0, *_ends(torch.int8), torch.int8)
    read = call(root, _QD.dequantize_per_channel.default, (weight, scales, zeros, *tail), weight, torch.float32)
    return _shaped(root, dequantized, read, bias)


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


def _rules(product: Pattern) -> tuple[Rule, ...]:
    """Returns the rules for a product whose rows of the weight have a scale each, behind it."""
    scaled = op("mul.Tensor", self=product, other=value("weight_scale"))
    with_bias = op("add", self=_rows(scaled), other=a_constant("bias"))
    return tuple(Rule(pattern, _linear) for pattern in (with_bias, op("reshape", "view", self=scaled), scaled))


_WEIGHT = op("t", self=a_constant("weight"))
_OF_FLOATS = op("mm", self=_rows(value("x")), mat2=_cast(_WEIGHT))
_OF_INTEGERS = op(
    "mul.Tensor",
    self=_cast(op("_int_mm", self=_rows(value("x")), mat2=_WEIGHT)),
    other=_cast(_rows(value("scale"))),
)
_LAYERS_OF_FLOATS = _rules(_OF_FLOATS)
_LAYERS = (*_LAYERS_OF_FLOATS, *_rules(_cast(_OF_INTEGERS)))
