"""Operators of q/dq graphs as nodes of ONNX, for torch's exporter.

Before: operators of `quantized_decomposed` and our own, whose numbers are constants of the dtypes that ONNX wants.
After: a function for each that writes QuantizeLinear, DequantizeLinear and what goes with them.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch

from quantplug.core.qdq.qparams import QD
from quantplug.core.specs.stored_dtypes import dtype_range

# From here on ONNX has integers of 4 and 16 bits, and scales of groups.
WIDE_OPSET = 21
_OWN = torch.ops.quantplug_onnx


def translations(opset: int) -> Mapping[Callable[..., Any], Callable[..., Any]]:
    """Returns what writes each operator, with nodes of an opset that the exporter can bring to another.

    Args:
        opset: that of the file; the exporter writes 18 and converts, other than to operators of a later one.
    """
    from onnxscript import opset18, opset21

    write = _Writer(opset21 if opset >= WIDE_OPSET else opset18)
    table: dict[Callable[..., Any], Callable[..., Any]] = {
        **dict.fromkeys(_overloads("quantize_per_tensor"), write.quantize),
        **dict.fromkeys(_overloads("dequantize_per_tensor"), write.dequantize),
        QD.quantize_per_channel.default: write.quantize_channels,
        QD.dequantize_per_channel.default: write.dequantize_channels,
        QD.choose_qparams.tensor: write.choose,
        _OWN.clip.default: write.clip,
        _OWN.dequantize_groups.default: write.dequantize_groups,
        _OWN.dynamic_product.default: write.dynamic_product,
    }
    return {operator: _function(method) for operator, method in table.items()}


def _function(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method as a function: the exporter reads its parameters, and notes on it what it read."""

    @wraps(method)
    def written(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return written


def _overloads(name: str) -> list[Callable[..., Any]]:
    return [getattr(getattr(QD, name), overload) for overload in ("default", "tensor", "tensor2")]


class _Writer:
    """Writes nodes of one opset; operands that are no constants are values of the exporter's."""

    def __init__(self, opset: Any) -> None:
        self.op = opset

    def number(self, value: Any, kind: int) -> Any:
        """Returns a number of an ONNX type; what is computed at run time is cast."""
        import onnx_ir as ir

        if isinstance(value, int | float):
            return self.op.Constant(value=ir.tensor(value, dtype=ir.DataType(kind)))
        return self.op.Cast(value, to=kind)

    def quantize(
        self,
        input: Any,  # noqa: A002
        scale: float,
        zero_point: int,
        quant_min: int,
        quant_max: int,
        dtype: int,
    ) -> Any:
        """Writes QuantizeLinear, and a Clip of its integers where the range is narrower than their dtype."""
        found = self.op.QuantizeLinear(input, self.number(scale, 1), self.number(zero_point, dtype))
        return self._within(found, quant_min, quant_max, dtype)

    def dequantize(
        self, input: Any, scale: float, zero_point: int, quant_min: int, quant_max: int, dtype: int,  # noqa: A002
        out_dtype: int = -1,
    ) -> Any:  # fmt: skip
        """Writes DequantizeLinear with one scale."""
        if dtype == 6:  # integers of 32 bits have no zero point
            return self.op.DequantizeLinear(input, self.number(scale, 1))
        return self.op.DequantizeLinear(input, self.number(scale, 1), self.number(zero_point, dtype))

    def quantize_channels(
        self, input: Any, scales: Any, zero_points: Any, axis: int, quant_min: int, quant_max: int, dtype: int  # noqa: A002
    ) -> Any:  # fmt: skip
        """Writes QuantizeLinear with a scale for each channel."""
        found = self.op.QuantizeLinear(input, scales, zero_points, axis=axis)
        return self._within(found, quant_min, quant_max, dtype)

    def dequantize_channels(
        self, input: Any, scales: Any, zero_points: Any, axis: int, quant_min: int, quant_max: int, dtype: int,  # noqa: A002
        out_dtype: int = -1,
    ) -> Any:  # fmt: skip
        """Writes DequantizeLinear with a scale for each channel; without zero points they are 0."""
        return self.op.DequantizeLinear(input, scales, *([] if zero_points is None else [zero_points]), axis=axis)

    def choose(self, input: Any, quant_min: int, quant_max: int, eps: float, dtype: int) -> Any:  # noqa: A002
        """Writes DynamicQuantizeLinear, whose scale and zero point are those of uint8."""
        _, scale, zero_point = self.op.DynamicQuantizeLinear(input)
        moved = self.op.Add(self.op.Cast(zero_point, to=7), self.number(quant_min, 7))
        return scale, moved

    def clip(self, integers: Any, low: int, high: int) -> Any:
        """Writes Clip of integers."""
        kind = int(integers.dtype)
        return self.op.Clip(integers, self.number(low, kind), self.number(high, kind))

    def dequantize_groups(self, integers: Any, scales: Any, axis: int, size: int) -> Any:
        """Writes DequantizeLinear with a scale for each group."""
        return self.op.DequantizeLinear(integers, scales, axis=axis, block_size=size)

    def dynamic_product(self, x: Any, weight: Any, scales: Any, bias: Any = None) -> Any:
        """Writes the form that ONNX Runtime fuses to a product of integers with a scale of run time."""
        integers, scale, zero_point = self.op.DynamicQuantizeLinear(x)
        total = self.op.Cast(self.op.MatMulInteger(integers, weight, zero_point), to=1)
        found = self.op.Mul(total, self.op.Mul(scale, scales))
        return found if bias is None else self.op.Add(found, bias)

    def _within(self, integers: Any, low: int, high: int, kind: int) -> Any:
        if (low, high) == dtype_range(_DTYPES[kind]):
            return integers
        return self.op.Clip(integers, self.number(low, kind), self.number(high, kind))


# As ONNX numbers them.
_DTYPES = {2: torch.uint8, 3: torch.int8, 4: torch.uint16, 5: torch.int16, 6: torch.int32}
