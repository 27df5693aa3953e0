"""What an observer becomes in the converted graph: quantize and dequantize nodes, or casts.

Before: a call of an observer that has seen data. After: one of

    quantize_per_tensor / per_channel -> dequantize      (static)
    choose_qparams -> quantize -> dequantize              (dynamic; per row: quantize_per_token)
    convert_element_type to half -> back                  (float16, bfloat16)
    whatever the observer's own `convert` makes           (affine observers: per group, per token)

or nothing, where the observer asks for no quantization (float32).
"""

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from quantplug.core.errors import CalibrationError, ConvertError, QuantplugError, first_line
from quantplug.core.observers.rowwise import add_rows, by_rows
from quantplug.core.observers.scheme import PER_CHANNEL
from quantplug.core.observers.straight_through import CHOOSE_QPARAMS
from quantplug.core.observers.torchao_histogram import calculate_qparams
from quantplug.core.specs.stored_dtypes import HALF_DTYPES, STORAGE_DTYPES, stored_range

_OPS = torch.ops.quantized_decomposed
# Elements that a constant is quantized by at a time: 1 MB of float32 stays in the caches.
_SLAB = 2**18


@dataclass(frozen=True)
class Quantization:
    """The numbers of a static quantization.

    Attributes:
        dtype: of the stored integers (or float8 values).
        quant_min: least stored value.
        quant_max: greatest stored value.
        scale: a positive float, or a tensor with one scale for each channel.
        zero_point: an int, or a tensor with one zero point for each channel.
        axis: the channels' dimension; None for one scale per tensor.
    """

    dtype: torch.dtype
    quant_min: int
    quant_max: int
    scale: float | Tensor
    zero_point: int | Tensor
    axis: int | None = None

    def equals(self, other: "Quantization") -> bool:
        """Tells whether two quantizations give the same integers for every value."""
        if self.tail != other.tail:
            return False
        pairs = ((self.scale, other.scale), (self.zero_point, other.zero_point))
        return all(torch.equal(torch.as_tensor(one), torch.as_tensor(two)) for one, two in pairs)

    @property
    def tail(self) -> tuple[Any, ...]:
        """The operators' arguments after scale and zero point."""
        limits = (self.quant_min, self.quant_max, self.dtype)
        return limits if self.axis is None else (self.axis, *limits)

    @property
    def operators(self) -> tuple[Any, Any]:
        """The quantize and the dequantize operator."""
        if self.axis is None:
            return _OPS.quantize_per_tensor.default, _OPS.dequantize_per_tensor.default
        return _OPS.quantize_per_channel.default, _OPS.dequantize_per_channel.default

    def quantize(self, value: Tensor) -> Tensor:
        """Returns the integers of a constant of the scales' number of channels, in the constant's shape.

        The operator works on slabs of rows: its float intermediates of a whole weight, freed one by one between
        integers that stay, leave holes in the heap that add up to the size of all the weights.
        """
        if value.dim() == 0:
            return self.quantize(value.reshape(1)).reshape(())
        stored = torch.empty_like(value, dtype=self.dtype)
        rows = max(1, _SLAB // max(1, value[:1].numel()))
        with torch.no_grad():
            for start in range(0, len(value), rows):
                slab = slice(start, start + rows)
                stored[slab] = self._quantize_rows(single_precision(value[slab]), slab)
        return stored

    def _quantize_rows(self, value: Tensor, rows: slice) -> Tensor:
        quantize, _ = self.operators
        if self.axis == 0 and isinstance(self.scale, Tensor) and isinstance(self.zero_point, Tensor):
            return quantize(value, self.scale[rows], self.zero_point[rows], *self.tail)  # type: ignore[no-any-return]
        return quantize(value, self.scale, self.zero_point, *self.tail)  # type: ignore[no-any-return]


def single_precision(value: Tensor) -> Tensor:
    """Returns a float64 tensor as float32, which is what the quantize operators take; others as they are."""
    return value.to(torch.float32) if value.dtype == torch.float64 else value


def kind_of(observer: nn.Module) -> str:
    """Returns what an observer becomes: "own", "dynamic", "static", "cast" or "nothing".

    Raises:
        ConvertError: its dtype has no quantize operator.
    """
    if by_rows(observer):
        return "dynamic"
    # Asked of the class: a module looks an absent attribute up among its parameters, buffers and children.
    if hasattr(type(observer), "convert"):
        return "own"
    dtype = getattr(observer, "dtype", torch.float32)
    if dtype in HALF_DTYPES:
        return "cast"
    if dtype in STORAGE_DTYPES:
        return "dynamic" if getattr(observer, "is_dynamic", False) else "static"
    if dtype == torch.float32:
        return "nothing"
    raise ConvertError(
        f"The observer {type(observer).__name__} has dtype {dtype}, for which there is no quantize operator; "
        f"choose one of {[str(d) for d in STORAGE_DTYPES]}."
    )


def static_quantization(observer: nn.Module, where: str, qparams: tuple[Tensor, Tensor] | None = None) -> Quantization:
    """Returns an observer's quantization parameters.

    Args:
        observer: a static observer or fake quantize that has seen data.
        where: how errors name what it observes.
        qparams: its scale and zero point where they are known; None asks the observer.

    Raises:
        CalibrationError: a scale is not finite and positive (the data held Inf or NaN).
        ConvertError: the observer, or what derives its parameters from those of others, fails.
    """
    try:
        scale, zero_point = qparams or calculate_qparams(observer)
    except AssertionError as error:  # so torchao's observers answer to NaN
        raise CalibrationError(
            f"What was observed of {where} has no range ({error}); remove Inf and NaN from the calibration data or "
            "the weights."
        ) from error
    except QuantplugError:
        raise
    except Exception as error:  # of a derivation or an observer of the user's own
        raise ConvertError(
            f"{type(observer).__name__} gives no scale and zero point of {where} ({first_line(error)}); mend its spec."
        ) from error
    unusable = next((s for s in torch.as_tensor(scale).reshape(-1).tolist() if not 0 < s < math.inf), None)
    if unusable is not None:
        raise CalibrationError(
            f"The scale of {where} is {unusable}, so what it observed was not finite; remove Inf and NaN from "
            "the calibration data or the weights."
        )
    low, high = stored_range(observer)
    dtype = STORAGE_DTYPES[observer.dtype]  # type: ignore[index]
    if getattr(observer, "qscheme", None) in PER_CHANNEL:
        return Quantization(dtype, low, high, scale, zero_point, int(observer.ch_axis))  # type: ignore[arg-type]
    return Quantization(dtype, low, high, float(scale), int(zero_point))


def add_dynamic(graph: fx.Graph, source: fx.Node, observer: Any) -> fx.Node:
    """Adds choose_qparams, quantize and dequantize after the insertion point and returns the dequantize node."""
    if by_rows(observer):
        return add_rows(graph, source, observer.granularity)
    dtype = STORAGE_DTYPES[observer.dtype]
    limits = stored_range(observer)
    scheme = getattr(observer, "qscheme", None) or torch.per_tensor_affine
    eps = float(getattr(observer, "eps", torch.finfo(torch.float32).eps))
    chosen = graph.call_function(CHOOSE_QPARAMS[scheme], (source, *limits, eps, dtype))
    scale = graph.call_function(operator.getitem, (chosen, 0))
    zero_point = graph.call_function(operator.getitem, (chosen, 1))
    tail = (scale, zero_point, *limits, dtype)
    quantize = graph.call_function(_OPS.quantize_per_tensor.tensor, (source, *tail))
    dequantize = _OPS.dequantize_per_tensor.tensor
    return graph.call_function(dequantize, (quantize, *tail), output_dtype(source))


def output_dtype(source: fx.Node) -> dict[str, Any]:
    """Returns the keyword that makes a dequantize node yield what its quantize node was given."""
    value = source.meta.get("val")
    dtype = value.dtype if isinstance(value, Tensor) else torch.float32
    return {} if dtype == torch.float32 else {"out_dtype": dtype}
