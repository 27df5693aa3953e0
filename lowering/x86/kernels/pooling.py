"""Averages on integers.

Before: `dequantize -> mean|adaptive_avg_pool2d|avg_pool2d`. After: an average over everything is the sum of
the integers, whose scale is divided by their number; an average over windows is a depthwise convolution with
weights of 1, whose requantization divides.
"""

import math
from typing import Any

import torch
from torch import fx

from quantplug.core.graph.editing import call, replace
from quantplug.core.graph.facts import operands, tensor_value
from quantplug.core.graph.meta import absorb
from quantplug.core.graph.traits import per_dimension
from quantplug.core.patterns.language import Match, literal, op
from quantplug.core.patterns.rules import Rule
from quantplug.core.qdq.qparams import QD, IntegerWeight, QParams, qparams
from quantplug.lowering.x86.geometry import objection
from quantplug.lowering.x86.integer_flow import STATIC_DEQUANTIZE
from quantplug.lowering.x86.kernels.products import activation_objection, convolve

aten = torch.ops.aten
# Sums of bytes up to here fit int32.
_MOST = 2**31 // 255


def _mean(match: Match) -> str | None:
    given, source = operands(match.root), match["integers"]
    dims = given.get("dim") or list(range(len(_sizes(source))))
    return _sum(match, dims, keepdim=given.get("keepdim", False))


def _global_pool(match: Match) -> str | None:
    if set(operands(match.root)["output_size"]) != {1}:
        return "its windows are smaller than the image"
    return _sum(match, [-2, -1], keepdim=True)


def _sum(match: Match, dims: list[int], *, keepdim: bool) -> str | None:
    sizes = [_sizes(match["integers"])[dim] for dim in dims]
    if not all(isinstance(size, int) for size in sizes):
        return "the number of its elements is known at run time only"
    number, params = math.prod(sizes), qparams(match["dequantize"])
    if number > _MOST or not params.is_static:
        return f"the sum of {number} integers may overflow, or their scale is computed at run time"
    total = call(match.root, aten.sum.dim_IntList, (match["integers"], dims, keepdim), match.root, torch.int32)
    total.kwargs = {"dtype": torch.int32}
    absorb(total, match.root)
    scale, zero_point = float(params.scale), int(params.zero_point)  # type: ignore[arg-type]
    of_sum = QParams(scale / number, zero_point * number, -(2**31), 2**31 - 1, torch.int32)
    replace(match.root, call(match.root, QD.dequantize_per_tensor.default, (total, *of_sum.args()), match.root))
    return None


def _windows(match: Match) -> str | None:
    given = operands(match.root)
    kernel = per_dimension(given["kernel_size"])
    padding = per_dimension(given["padding"])
    if given["ceil_mode"] or (any(padding) and not given["count_include_pad"]):
        return "its windows at the border have other sizes than those inside"
    return _average(match, kernel, per_dimension(given["stride"]) or kernel, padding, given["divisor_override"])


def _even_windows(match: Match) -> str | None:
    """Adaptive pooling whose windows all have one size."""
    sizes, wanted = _sizes(match["integers"])[-2:], per_dimension(operands(match.root)["output_size"])
    if any(not isinstance(size, int) or size % out for size, out in zip(sizes, wanted, strict=True)):
        return f"an image of {tuple(sizes)} has no equal windows for {tuple(wanted)} averages"
    kernel = [size // out for size, out in zip(sizes, wanted, strict=True)]
    return _average(match, kernel, kernel, [0, 0], None)


def _average(match: Match, kernel: list[int], stride: list[int], padding: list[int], divisor: int | None) -> str | None:
    sizes = _sizes(match["integers"])
    channels: Any = sizes[1] if len(sizes) == 4 else None
    if not isinstance(channels, int):
        return "its input has no dimension of channels of a known size"
    scale = torch.full((channels,), 1.0 / (divisor or math.prod(kernel)))
    ones = IntegerWeight(torch.ones(channels, 1, *kernel, dtype=torch.int8), scale)
    geometry = (stride, padding, [1, 1], channels)
    reason = activation_objection(qparams(match["dequantize"]), ones, conv=True)
    reason = reason or objection(sizes, ones.values.shape, geometry)
    if reason is None:
        convolve(match, ones, geometry)
    return reason


def _sizes(node: fx.Node) -> tuple[Any, ...]:
    found = tensor_value(node)
    return () if found is None else tuple(found.shape)


AVERAGES = (
    Rule(op("mean.default", "mean.dim", self=STATIC_DEQUANTIZE, dtype=literal(None, torch.float32)), _mean),
    Rule(op("adaptive_avg_pool2d", self=STATIC_DEQUANTIZE), _global_pool),
    Rule(op("adaptive_avg_pool2d", self=STATIC_DEQUANTIZE), _even_windows),
    Rule(op("avg_pool2d", self=STATIC_DEQUANTIZE), _windows),
)
