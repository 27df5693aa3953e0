"""Conversions between float and integer tensors in as few passes over memory as eager torch offers.

Before: `quantized_decomposed` nodes, which allocate a new tensor for each of four steps. After: the same
steps in the same order, so the same integers, in place after the first.
"""

import torch
from torch import fx

from quantplug.core.pattern import Match, value
from quantplug.lowering.qparams import dequantize, is_static, qparams, quantize
from quantplug.lowering.rewriting import Rule, absorb, apply, call, replace

aten = torch.ops.aten


def spell_out(graph: fx.Graph) -> None:
    """Replaces static quantize and dequantize nodes by the ATen operators that they stand for."""
    apply(graph, CONVERSIONS)


def _quantize(match: Match) -> str | None:
    node, params = match.root, qparams(match.root)
    assert isinstance(params.scale, float)
    # a channels-last result needs no reorder in front of a convolution
    scaled = call(node, aten.mul.Tensor, (match["x"], 1.0 / params.scale), match["x"])
    step = call(node, aten.round_.default, (scaled,), scaled)
    if params.zero_point:
        step = call(node, aten.add_.Tensor, (step, params.zero_point), step)
    step = call(node, aten.clamp_.default, (step, params.qmin, params.qmax), step)
    integers = call(node, aten.to.dtype, (step, params.dtype), node)
    absorb(integers, node)
    replace(node, integers)
    return None


def _dequantize(match: Match) -> str | None:
    node, params = match.root, qparams(match.root)
    step = call(node, aten.to.dtype, (match["x"], torch.float32), node)
    if params.zero_point:
        step = call(node, aten.sub_.Tensor, (step, params.zero_point), step)
    step = call(node, aten.mul_.Tensor, (step, params.scale), step)
    absorb(step, node)
    replace(node, step)
    return None


def _is_static(match: Match) -> str | None:
    return is_static(match.root)


CONVERSIONS = (
    Rule(quantize(input=value("x"), where=(_is_static,)), _quantize),
    Rule(dequantize(input=value("x"), out_dtype=None, where=(_is_static,)), _dequantize),
)
