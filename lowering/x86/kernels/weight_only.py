"""Linears for which reading the integer weight is most of the work.

Before: `linear(float, dequantize(integer weight))`, of few rows if the integers have eight bits. After: a kernel that
streams the integers. It multiplies in bfloat16 and adds in float32, but its result has the 8 bits of bfloat16 and is at
about 50 dB. Scales of channels are applied afterwards, those of groups by the kernel.
"""

from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.graph.editing import call, constant, viewed
from quantplug.core.graph.facts import rank, tensor_value
from quantplug.core.patterns.language import Match, op, optional, value
from quantplug.core.patterns.rules import Rule
from quantplug.core.qdq.nodes import is_qdq
from quantplug.core.qdq.qparams import IntegerWeight, integer_weight
from quantplug.lowering.x86.kernels.four_bits import PACK, GroupedWeight, grouped_weight, integers, scales_and_zeros

aten = torch.ops.aten
HALF = torch.bfloat16
# Measured on AMD Zen 5 (AVX512, no AMX) against float32: 1 row 3.5 times faster, 8 rows 1.7 times, 32 rows as fast,
# and then slower; a weight of fewer elements is not worth the conversions.
MOST_ROWS, LEAST_ELEMENTS = 16, 2**19
# The kernel reads whole vectors of weights, also beyond the end.
VECTOR = 16
NO_FLOAT = "its activation is no float32 tensor"


def _lower(match: Match) -> fx.Node | str:
    grouped = grouped_weight(match["weight"])
    if isinstance(grouped, GroupedWeight):
        return _of_groups(match, grouped)
    weight = integer_weight(match["weight"])
    if isinstance(weight, str):
        return weight
    objection = _objection(match["x"], weight)
    return objection or product_in_half(match, match["x"], weight.values, weight.scales)


def _objection(x: fx.Node, weight: IntegerWeight) -> str | None:
    """Returns why a float product is used, or None."""
    found = _float_tensor(x)
    if found is None:
        return NO_FLOAT
    return size_objection(found, weight, MOST_ROWS, LEAST_ELEMENTS)


def _float_tensor(x: fx.Node) -> Tensor | None:
    found = tensor_value(x)
    return None if found is None or found.dtype != torch.float32 or is_qdq(x) else found


def _of_groups(match: Match, weight: GroupedWeight) -> fx.Node | str:
    """Returns the kernel of four bits for the place of a linear, or why there is none."""
    if _float_tensor(match["x"]) is None:
        return NO_FLOAT
    node = match.root
    packed = constant(node, f"{node.name}_weight", weight.packed)
    scales = constant(node, f"{node.name}_scales", weight.scales.t().to(HALF).contiguous())
    packed, scales = call(node, PACK, (integers(node, packed), 1), packed), scales_and_zeros(node, scales)
    half = _in_half(node, match["x"], weight.columns)
    product = call(node, aten._weight_int4pack_mm_for_cpu.default, (half, packed, weight.size, scales), node, HALF)
    return _widened(match, match["x"], product)


def size_objection(x: Tensor, weight: IntegerWeight, most_rows: int, least_elements: int) -> str | None:
    """Returns why a linear is not one of few rows and many weights, or None."""
    shape = tuple(weight.values.shape)
    rows = x.numel() // shape[1] if len(shape) == 2 else 0
    if not isinstance(rows, int) or not 0 < rows <= most_rows:
        return f"with {rows} rows the other kernel is faster than the one that streams integers"
    if weight.values.numel() < least_elements or shape[1] % VECTOR:
        return f"its weight of {shape} is too small, or its rows no multiple of {VECTOR}"
    return None


def product_in_half(match: Match, x: fx.Node, values: Tensor, scales: Tensor) -> fx.Node:
    """Writes a linear of few rows by the kernel that streams integer weights; it yields float32.

    Args:
        match: its root is the linear in whose place it will stand, "bias" perhaps its bias.
        x: the activation, float32 or bfloat16.
        values: int8 weight, output channels first.
        scales: what the results are multiplied with, one for each output channel.
    """
    node, (outer, inner) = match.root, values.shape
    found = {"weight": values, "ones": torch.ones(outer, dtype=HALF), "scales": scales}
    constants = [constant(node, f"{node.name}_{name}", number) for name, number in found.items()]
    half = _in_half(node, x, inner)
    product = call(node, aten._weight_int8pack_mm.default, (half, *constants[:2]), node, HALF)
    return _widened(match, x, product, constants[2])


def _in_half(before: fx.Node, x: fx.Node, columns: int) -> fx.Node:
    return call(before, aten.to.dtype, (_matrix(before, x, columns), HALF), x, HALF)


def _widened(match: Match, x: fx.Node, product: fx.Node, scales: fx.Node | None = None) -> fx.Node:
    """Returns what stands for the linear: the product in float32, with scales and bias, in the linear's form."""
    node = match.root
    result = call(node, aten.to.dtype, (product, torch.float32), node)
    if scales is not None:
        result = call(node, aten.mul.Tensor, (result, scales), node)
    if match.get("bias") is not None:
        result = call(node, aten.add.Tensor, (result, match["bias"]), node)
    return _as_before(node, x, result)


def _matrix(before: fx.Node, x: fx.Node, columns: int) -> fx.Node:
    return x if rank(x) == 2 else call(before, aten.reshape.default, (x, [-1, columns]), x)


def _as_before(node: fx.Node, x: fx.Node, result: fx.Node) -> fx.Node:
    """Returns a matrix as the linear would have it, with every dimension of the activation but the last."""
    found = tensor_value(node)
    if found is None or found.dim() == 2:
        return result
    sizes: list[Any] = list(found.shape)
    opened = [axis for axis, size in enumerate(sizes) if not isinstance(size, int)]
    for axis in opened:
        sizes[axis] = -1 if len(opened) == 1 else viewed(node, aten.sym_size.int, x, axis)
    return call(node, aten.reshape.default, (result, sizes), node)


WEIGHT_ONLY = (Rule(op("linear", input=value("x"), weight=value("weight"), bias=optional(value("bias"))), _lower),)
