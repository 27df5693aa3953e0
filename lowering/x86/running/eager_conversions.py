"""Conversions between float and integer tensors in as few passes over memory as eager torch offers.

Before: `quantized_decomposed` nodes, which allocate a new tensor for each of four steps. After: the same
steps in the same order, so the same integers, in place after the first. Parameters of run time are numbers, not tensors
of one: choosing these by operators takes longer than a product of one row by a matrix.
"""

import math
import operator
from collections.abc import Mapping
from ctypes import c_float
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.graph.editing import call
from quantplug.core.graph.facts import operands, tensor_value
from quantplug.core.patterns.language import Match, value
from quantplug.core.patterns.rules import Rule, apply
from quantplug.core.qdq.qparams import QD, QParams, dequantize, is_static, qparams, quantize
from quantplug.lowering.cached_attention import CACHED_ATTENTION, attend
from quantplug.lowering.x86.kernels.few_rows import OF_NUMBERS, of_parameters
from quantplug.lowering.x86.running.runtime_ranges import UNSIGNED_MIDDLE

aten, onednn = torch.ops.aten, torch.ops.onednn


def spell_out(graph: fx.Graph) -> None:
    """Replaces quantize and dequantize nodes by operators that take numbers."""
    for node in list(graph.nodes):
        if node.target in _CHOICES:
            _choose_numbers(node)
        elif node.target is CACHED_ATTENTION:
            node.target = attend
    apply(graph, CONVERSIONS)


def _choose_numbers(choose: fx.Node) -> None:
    """Lets parameters of a float32 tensor be numbers, if all that read them have a form that takes numbers."""
    given, items = operands(choose), list(choose.users)
    x, readers = tensor_value(given["input"]), dict.fromkeys(reader for item in items for reader in item.users)
    is_known = all(item.target is operator.getitem for item in items)
    is_known &= all(reader.target in _OF_NUMBERS for reader in readers)
    if x is None or x.dtype != torch.float32 or not is_known:
        return
    for reader in readers:
        if reader.target is QD.quantize_per_tensor.tensor:
            reader.args, reader.kwargs = tuple(operands(reader).values()), {}
        reader.target = _OF_NUMBERS[reader.target]
    choose.args = (given["input"], given["quant_min"], given["quant_max"], given["eps"], given["dtype"])
    choose.target = _CHOICES[choose.target]


def affine_numbers(x: Tensor, low: int, high: int, least: float, _: torch.dtype) -> tuple[float, int]:
    """Returns scale and zero point of `quantized_decomposed::choose_qparams` in its own arithmetic, float32.

    Sums and quotients of float32 are the same when they are computed in float64 and rounded.
    Source: Figueroa, "When is double rounding innocuous?", 1995.
    """
    lowest, highest = _range(x)
    scale = max(_single(_single(highest - lowest) / (high - low)), _single(least))
    if not math.isfinite(scale):
        return scale, low  # whatever is multiplied by it is no number either
    return scale, min(max(low - round(_single(lowest / scale)), low), high)


def symmetric_numbers(x: Tensor, low: int, high: int, least: float, dtype: torch.dtype) -> tuple[float, int]:
    """Returns scale and zero point of `quantized_decomposed::choose_qparams_symmetric`."""
    lowest, highest = _range(x)
    scale = max(_single(max(-lowest, highest) / ((high - low) / 2)), _single(least))
    return scale, UNSIGNED_MIDDLE if dtype == torch.uint8 else 0


def _range(x: Tensor) -> tuple[float, float]:
    lowest, highest = x.aminmax()
    return min(lowest.item(), 0.0), max(highest.item(), 0.0)


def _single(number: float) -> float:
    return c_float(number).value


def integers_of(x: Tensor, scale: float, zero_point: int, quant_min: int, quant_max: int, dtype: torch.dtype) -> Tensor:
    """Returns what `quantized_decomposed::quantize_per_tensor` does."""
    steps = (x * (1.0 / scale)).round_()
    if dtype != torch.uint8:
        return steps.add_(zero_point).clamp_(quant_min, quant_max).to(dtype)
    signed = steps.add_(zero_point - 128).clamp_(quant_min - 128, quant_max - 128).to(torch.int8)
    return signed.view(torch.uint8).bitwise_xor_(128)


_CHOICES: Mapping[Any, Any] = {
    QD.choose_qparams.tensor: affine_numbers,
    QD.choose_qparams_symmetric.tensor: symmetric_numbers,
}
_KERNELS = (onednn.qlinear_pointwise, onednn.qconv_pointwise, onednn.qconv2d_pointwise)
_OF_NUMBERS: Mapping[Any, Any] = {
    QD.quantize_per_tensor.tensor: integers_of,
    QD.dequantize_per_tensor.tensor: QD.dequantize_per_tensor.default,
    of_parameters: OF_NUMBERS,
    **{kernel.tensor: kernel.default for kernel in _KERNELS},
    **{kernel.binary_tensor: kernel.binary for kernel in _KERNELS if hasattr(kernel, "binary")},
}


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
