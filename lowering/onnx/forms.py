"""A q/dq graph in the forms that an engine has integer kernels for.

Before: a graph that is spelled plainly. After: the same numbers. Linear layers multiply by a matrix [in, out] of
integers, and scales and zero points are constants of the dtypes that ONNX wants. For an engine that computes on
integers biases of quantized layers are int32 in the scale of the sum, and clamps in front of a rounding are clamps of
integers; for any other biases are float, and ranges narrower than their dtype are clamps in front of the rounding.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.errors import LoweringError
from quantplug.core.graph.constants import expression_value
from quantplug.core.graph.editing import call, constant, set_operand
from quantplug.core.graph.facts import (
    constant_value,
    describe,
    is_constant,
    operands,
    operator_name,
    rank,
    tensor_value,
)
from quantplug.core.patterns.language import Match, op, value
from quantplug.core.patterns.rules import Rule, apply
from quantplug.core.qdq.nodes import is_dequantize, is_qdq, is_quantize
from quantplug.core.qdq.qparams import DEQUANTIZE_PER_TENSOR, QD, StaticQParams, qparams, static_qparams
from quantplug.core.specs.stored_dtypes import dtype_range
from quantplug.lowering.clamps import clamp_rules
from quantplug.lowering.onnx import operators  # noqa: F401  (registers what the forms call)
from quantplug.lowering.onnx.engines import Engine
from quantplug.lowering.onnx.patches import patch_rule
from quantplug.lowering.run_time import chain_of

_ATEN = torch.ops.aten
_OWN = torch.ops.quantplug_onnx
_GROUPS = _OWN.dequantize_groups.default
_INT32 = (-(2**31), 2**31 - 1, torch.int32)
_OF_ACTIVATIONS = frozenset(f"aten::{name}" for name in ("add", "add_", "mul", "mul_", "cat"))
_NAMES = ("conv1d.default", "conv2d.default", "conv3d.default")
_CONVOLUTIONS = op(*_NAMES, bias=None)
_PRODUCTS = op("linear.default", *_NAMES)


def write_forms(graph: fx.Graph, engine: Engine) -> frozenset[str]:
    """Rewrites a graph, in place; returns the names of the weights that take four bits.

    Args:
        graph: the graph.
        engine: what is to read it.

    Raises:
        LoweringError: a node quantizes in a way that ONNX has no operators for.
    """
    narrow: set[str] = set()
    for node in graph.find_nodes(op="call_function", target=_ATEN.clamp.default):
        _bound_by_floats(node)
    if engine.computes_on_integers:
        apply(graph, clamp_rules(value()))
        apply(graph, [Rule(op("clamp.default", self=value("x")), _clipped)])
    apply(graph, [Rule(_CONVOLUTIONS, _zero_bias)])
    if engine.computes_on_integers:
        apply(graph, [Rule(_PRODUCTS, _integer_bias)])
        apply(graph, [patch_rule()])
    else:
        _leave_floats(graph)
    apply(graph, [Rule(op("linear.default", input=value("x")), lambda match: _product(match, narrow, engine))])
    for node in list(graph.nodes):
        if is_qdq(node):
            _store_numbers(node, engine)
    return frozenset(narrow)


def _bound_by_floats(clamp: fx.Node) -> None:
    """Writes whole bounds of floats as floats: torch 2.13's exporter makes a tensor of one beside one that is not."""
    tensor = tensor_value(clamp)
    if tensor is not None and tensor.is_floating_point():
        clamp.args = (clamp.args[0], *(float(b) if isinstance(b, int) else b for b in clamp.args[1:]))
        clamp.kwargs = {name: float(b) if isinstance(b, int) else b for name, b in clamp.kwargs.items()}


def _leave_floats(graph: fx.Graph) -> None:
    """Makes constants of int32 float, and clamps numbers before a rounding to a range narrower than its dtype."""
    for node in list(graph.nodes):
        params = static_qparams(node) if is_quantize(node) else None
        if params is not None and (params.quant_min, params.quant_max) != dtype_range(params.dtype):
            _clamp_before(node, params)
        elif is_dequantize(node) and operands(node).get("dtype") == torch.int32:
            found = expression_value(node)
            if found is not None:
                node.replace_all_uses_with(constant(node, f"{node.name}_float", found.detach()))


def _clamp_before(node: fx.Node, params: StaticQParams) -> None:
    source, (low, high) = node.all_input_nodes[0], dtype_range(params.dtype)
    clamped = call(node, _ATEN.clamp.default, (source, *params.bounds), source)
    node.args, node.kwargs = (clamped, *replace(params, quant_min=low, quant_max=high).args()), {}


def shift_to_unsigned(graph: fx.Graph) -> None:
    """Moves activations of int8 by 128 to uint8, in place: the same real numbers.

    ONNX Runtime does so itself where one operator reads them, and computes in float where several do.
    """
    for node in list(graph.nodes):
        if _is_summand(node):
            _shift_constant(node)
        params = static_qparams(node) if is_quantize(node) else None
        readers = [static_qparams(user) if is_dequantize(user) else None for user in node.users]
        if params is None or params.dtype != torch.int8 or any(found != params for found in readers):
            continue
        shifted = params.shifted(128, torch.uint8).args()
        for each in (node, *node.users):
            each.args, each.kwargs = (each.all_input_nodes[0], *shifted), {}
        node.meta["val"] = node.meta["val"].to(torch.uint8)


def _is_summand(node: fx.Node) -> bool:
    """Tells whether a node is a constant of int8 that a kernel reads as it reads activations."""
    params = static_qparams(node) if is_dequantize(node) and is_constant(node.args[0]) else None
    is_read_alike = all(operator_name(user) in _OF_ACTIVATIONS for user in node.users)
    return params is not None and params.dtype == torch.int8 and is_read_alike


def _shift_constant(node: fx.Node) -> None:
    stored = constant_value(node.all_input_nodes[0])
    assert stored is not None  # `_is_summand` read it
    shifted = constant(node, f"{node.name}_shifted", (stored.detach().to(torch.int16) + 128).to(torch.uint8))
    node.args, node.kwargs = (shifted, *qparams(node).shifted(128, torch.uint8).args()), {}


def _clipped(match: Match) -> fx.Node | str:
    node, found = match.root, tensor_value(match["x"])
    if found is None or found.dtype not in (torch.uint8, torch.int8):
        return "it clamps no integers"
    return call(node, _OWN.clip.default, (match["x"], *node.args[1:3]), node)


def _zero_bias(match: Match) -> fx.Node | str:
    """The exporter writes a bias that is computed where there is none, and ONNX Runtime's kernels take constants."""
    node, weight = match.root, tensor_value(operands(match.root)["weight"])
    if weight is None:
        return "its weight is not known"
    set_operand(node, "bias", constant(node, f"{node.name}_bias", torch.zeros(weight.shape[0], dtype=weight.dtype)))
    return node


def _integer_bias(match: Match) -> fx.Node | str:
    """A float bias becomes int32 in the scale of the sum, as the kernels hold it."""
    node, given = match.root, operands(match.root)
    bias = constant_value(given["bias"]) if isinstance(given["bias"], fx.Node) else None
    scale, scales = _scale_of(given["input"]), _scales_of(given["weight"])
    if bias is None or not bias.is_floating_point() or scale is None or scales is None:
        return "it has no float bias beside integers"
    step = (scale * scales.double()).to(torch.float32).expand(bias.shape[0]).contiguous()
    stored = (bias.detach().double() / step.double()).round()
    if bool((stored.abs() >= 2**31).any()):
        return "its bias is beyond the integers of 32 bits"
    integers = constant(node, f"{given['bias'].target}_stored", stored.to(torch.int32))
    steps = constant(node, f"{given['bias'].target}_scale", step)
    args = (integers, steps, None, 0, *_INT32)
    set_operand(node, "bias", call(node, QD.dequantize_per_channel.default, args, given["bias"]))
    return node


def _scale_of(node: Any) -> float | None:
    """Returns the scale of a static activation of 8 bits."""
    if not (isinstance(node, fx.Node) and node.target in DEQUANTIZE_PER_TENSOR) or is_constant(node.args[0]):
        return None
    found = qparams(node)
    return found.static().scale if found.is_static and found.dtype in (torch.uint8, torch.int8) else None


def _scales_of(node: Any) -> Tensor | None:
    """Returns the scales of an int8 constant around zero."""
    if not is_dequantize(node) or not is_constant(node.args[0]):
        return None
    given = operands(node)
    stored, zeros = constant_value(given["input"]), given.get("zero_point", given.get("zero_points"))
    zeros = constant_value(zeros) if isinstance(zeros, fx.Node) else zeros
    is_around_zero = zeros is None or not bool(torch.as_tensor(zeros).any())
    if stored is None or stored.dtype != torch.int8 or not is_around_zero:
        return None
    if node.target is QD.dequantize_per_channel.default:
        return constant_value(given["scales"])
    return torch.tensor(qparams(node).static().scale) if node.target in DEQUANTIZE_PER_TENSOR else None


def _product(match: Match, narrow: set[str], engine: Engine) -> fx.Node | str:
    """A linear layer over integers becomes a product with the matrix turned, which ONNX Runtime packs."""
    node, given = match.root, operands(match.root)
    weight = given["weight"]
    if not is_dequantize(weight) or not is_constant(weight.args[0]) or rank(weight.args[0]) != 2:
        return "its weight is no matrix of integers"
    chain = chain_of(match["x"]) if engine.computes_on_integers else None
    if chain is not None:
        return _at_run_time(node, chain.source, chain.choose, given)
    turned = _groups(node, weight, narrow, engine) if "block_size" in operands(weight) else _channels(node, weight)
    product = call(node, _ATEN.matmul.default, (match["x"], turned), node)
    return product if given["bias"] is None else call(node, _ATEN.add.Tensor, (product, given["bias"]), node)


def _at_run_time(node: fx.Node, source: fx.Node, choose: fx.Node, given: dict[str, Any]) -> fx.Node | str:
    scales = _scales_of(given["weight"])
    if scales is None or choose.target is not QD.choose_qparams.tensor:
        return "ONNX Runtime has a product with one scale of run time, beside a weight of int8 around zero"
    stored = constant_value(operands(given["weight"])["input"])
    assert stored is not None  # it has scales
    weight = constant(node, f"{given['weight'].name}_turned", stored.detach().t().contiguous())
    numbers = constant(node, f"{given['weight'].name}_scales", scales.to(torch.float32).reshape(-1))
    return call(node, _OWN.dynamic_product.default, (source, weight, numbers, given["bias"]), node)


def _channels(node: fx.Node, weight: fx.Node) -> fx.Node:
    given = operands(weight)
    stored = constant_value(given["input"])
    assert stored is not None  # the caller chose it by that
    turned = constant(node, f"{given['input'].target}_turned", stored.detach().t().contiguous())
    new = call(node, weight.target, (turned, *weight.args[1:]), weight)
    if "axis" in given:
        set_operand(new, "axis", 1 - given["axis"] % 2)
    return _seen_as(new, stored.t())


def _seen_as(node: fx.Node, stored: Tensor) -> fx.Node:
    """Notes what a dequantize node of a constant yields."""
    node.meta["val"] = stored.new_empty(stored.shape, dtype=torch.float32)
    return node


def _groups(node: fx.Node, weight: fx.Node, narrow: set[str], engine: Engine) -> fx.Node:
    given = operands(weight)
    stored, scales = constant_value(given["input"]), constant_value(given["scale"])
    zeros = constant_value(given["zero_point"]) if isinstance(given["zero_point"], fx.Node) else None
    size = given["block_size"][-1]
    if stored is None or scales is None or given["block_size"][0] != 1 or (zeros is not None and bool(zeros.any())):
        raise LoweringError(
            f"{describe(weight)} has zero points, or blocks of {given['block_size']}, which no kernel of {engine.name} "
            "reads; quantize symmetrically, with a scale for a group of input channels."
        )
    turned = constant(node, f"{given['input'].target}_turned", stored.detach().t().contiguous())
    if given["quant_min"] >= -8 and given["quant_max"] <= 7:
        narrow.add(str(turned.target))
    by_group = scales.detach().to(torch.float32).reshape(stored.shape[0], -1).t().contiguous()
    numbers = constant(node, f"{given['input'].target}_scales", by_group)
    new = call(node, _GROUPS, (turned, numbers, 0, size), weight)
    return _seen_as(new, stored.t())


def _store_numbers(node: fx.Node, engine: Engine) -> None:
    """Writes scales and zero points of channels as ONNX stores them: float32, the dtype of the integers, none for 0."""
    given = operands(node)
    if "affine" in str(node.target) or "per_token" in str(node.target):
        raise LoweringError(
            f"{describe(node)} has a scale for each row or group of what is no weight of a linear layer, for which "
            f"{engine.name} has no kernel; quantize with one scale for the tensor, or use backend 'xnnpack'."
        )
    if "axis" in given and "scales" in given:
        _store_channels(node, given)


def _store_channels(node: fx.Node, given: dict[str, Any]) -> None:
    scales, zeros = constant_value(given["scales"]), given["zero_points"]
    zeros = constant_value(zeros) if isinstance(zeros, fx.Node) else None
    if scales is None:
        raise LoweringError(
            f"{describe(node)} has scales of run time for each channel; quantize with one scale for the tensor."
        )
    if scales.dtype != torch.float32:
        set_operand(node, "scales", constant(node, f"{node.name}_scales", scales.detach().to(torch.float32)))
    if given["dtype"] == torch.int32:  # has no zero points in ONNX
        set_operand(node, "zero_points", None)
    else:  # also where they are 0: ONNX Runtime takes no weight without
        stored = torch.zeros(scales.shape, dtype=given["dtype"]) if zeros is None else zeros.detach().to(given["dtype"])
        set_operand(node, "zero_points", constant(node, f"{node.name}_zeros", stored))


def of_wide_opset(graph: fx.Graph) -> fx.Node | None:
    """Returns a node whose integers ONNX has from opset 21 on: of 4 or 16 bits, or with scales of groups."""
    wide = (torch.int16, torch.uint16)
    return next((node for node in graph.nodes if _dtype_of(node) in wide or node.target is _GROUPS), None)


def _dtype_of(node: fx.Node) -> torch.dtype | None:
    return operands(node).get("dtype") if is_qdq(node) else None
