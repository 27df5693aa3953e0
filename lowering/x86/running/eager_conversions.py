"""Conversions between float and integer tensors in as few passes over memory as eager torch offers.

Before: `quantized_decomposed` nodes, which allocate a new tensor for each of four steps. After: the same
steps in the same order, so the same integers, in place after the first.
"""

import torch
from torch import fx

from quantplug.core.graph.editing import call
from quantplug.core.patterns.language import Match, value
from quantplug.core.patterns.rules import Rule, apply
from quantplug.core.qdq.qparams import QParams, dequantize, is_static, qparams, quantize

aten = torch.ops.aten


def spell_out(graph: fx.Graph) -> None:
    """Replaces static quantize and dequantize nodes by the ATen operators that they stand for."""
    apply(graph, CONVERSIONS)


def _quantize(match: Match) -> fx.Node:
    node, params = match.root, qparams(match.root)
    if params.dtype != torch.uint8:
        return _integers(match, params)
    # ATen converts float to int8 in vectors, to uint8 one by one, which takes five times as long.
    signed = params.shifted(-128, torch.int8)
    view = call(node, aten.view.dtype, (_integers(match, signed), torch.uint8), node)
    return call(node, aten.bitwise_xor_.Scalar, (view, 128), node)


def _integers(match: Match, params: QParams) -> fx.Node:
    node = match.root
    scaled = call(node, aten.mul.Tensor, (match["x"], 1.0 / params.static().scale), match["x"])
    step = call(node, aten.round_.default, (scaled,), scaled)
    if params.zero_point:
        step = call(node, aten.add_.Tensor, (step, params.zero_point), step)
    step = call(node, aten.clamp_.default, (step, params.quant_min, params.quant_max), step)
    return call(node, aten.to.dtype, (step, params.dtype), node, params.dtype)


def _dequantize(match: Match) -> fx.Node:
    node, params = match.root, qparams(match.root)
    step = call(node, aten.to.dtype, (match["x"], torch.float32), node)
    if params.zero_point:
        step = call(node, aten.sub_.Tensor, (step, params.zero_point), step)
    return call(node, aten.mul_.Tensor, (step, params.scale), step)


def _is_static(match: Match) -> str | None:
    return is_static(match.root)


CONVERSIONS = (
    Rule(quantize(input=value("x"), where=(_is_static,)), _quantize),
    Rule(dequantize(input=value("x"), out_dtype=None, where=(_is_static,)), _dequantize),
)
