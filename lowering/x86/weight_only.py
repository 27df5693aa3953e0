"""Linears of float activations and integer weights.

Before: `linear(float, dequantize(integer weight))`. After: a kernel that reads the integers, for products of so few
rows that reading the weight is most of the work. It multiplies in bfloat16, whose 8 bits leave the result at about
50 dB; the scales are applied to its float32 result.
"""

from collections.abc import Callable

import torch
from torch import fx

from quantplug.core.graph import rank, tensor_value
from quantplug.core.pattern import Match, op, optional, value
from quantplug.lowering.placement import is_quantization
from quantplug.lowering.qparams import IntegerWeight, integer_weight
from quantplug.lowering.rewriting import Rule, absorb, call, constant, replace

aten = torch.ops.aten
# Measured on AMD Zen 5 (AVX512, no AMX) against float32: 1 row 3.5 times faster, 8 rows 1.7 times, 32 rows as fast,
# and then slower; a weight of fewer elements is not worth the conversions.
MOST_ROWS, LEAST_ELEMENTS = 16, 2**19
# The kernel reads whole vectors of weights, also beyond the end.
VECTOR = 16


def _lower(channel_axis: int) -> Callable[[Match], str | None]:
    def lower(match: Match) -> str | None:
        weight = integer_weight(match["weight"], channel_axis)
        reason = weight if isinstance(weight, str) else _objection(match["x"], weight)
        if reason is None:
            assert isinstance(weight, IntegerWeight)
            replace(match.root, _product(match, weight))
        return reason

    return lower


def _objection(x: fx.Node, weight: IntegerWeight) -> str | None:
    """Returns why a float product is used, or None."""
    found, shape = tensor_value(x), tuple(weight.values.shape)
    if found is None or found.dtype != torch.float32 or is_quantization(x) or len(shape) != 2:
        return "its activation is no float32 tensor"
    rows = found.numel() // shape[1]
    if not isinstance(rows, int) or rows > MOST_ROWS:
        return f"with {rows} rows the float kernel is faster than the one that reads integers"
    if weight.values.numel() < LEAST_ELEMENTS or shape[1] % VECTOR:
        return f"its weight of {shape} is too small, or its rows no multiple of {VECTOR}"
    return None


def _product(match: Match, weight: IntegerWeight) -> fx.Node:
    node, (outer, inner) = match.root, weight.values.shape
    ones = torch.ones(outer, dtype=torch.bfloat16)
    values, ones_, scales = (
        constant(node, f"{node.name}_{name}", found)
        for name, found in (("weight", weight.values), ("ones", ones), ("scales", weight.scales))
    )
    half = call(node, aten.to.dtype, (_matrix(node, match["x"], inner), torch.bfloat16), match["x"], torch.bfloat16)
    product = call(node, aten._weight_int8pack_mm.default, (half, values, ones_), node, torch.bfloat16)
    absorb(product, node)
    result = call(node, aten.mul.Tensor, (call(node, aten.to.dtype, (product, torch.float32), node), scales), node)
    if match.get("bias") is not None:
        result = call(node, aten.add.Tensor, (result, match["bias"]), node)
    return _as_before(node, result)


def _matrix(before: fx.Node, x: fx.Node, columns: int) -> fx.Node:
    return x if rank(x) == 2 else call(before, aten.reshape.default, (x, [-1, columns]), x)


def _as_before(node: fx.Node, result: fx.Node) -> fx.Node:
    found = tensor_value(node)
    if found is None or found.dim() == 2:
        return result
    return call(node, aten.reshape.default, (result, list(found.shape)), node)


_BIAS = optional(value("bias"))
WEIGHT_ONLY = (
    Rule(op("linear", input=value("x"), weight=value("weight"), bias=_BIAS), _lower(0)),
    Rule(op("addmm", self=value("bias"), mat1=value("x"), mat2=value("weight"), beta=1, alpha=1), _lower(1)),
    Rule(op("mm", self=value("x"), mat2=value("weight")), _lower(1)),
)
