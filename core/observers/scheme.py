"""Quantization parameters from ranges: (low, high) -> (scale, zero point), for whole batches of ranges at once.

The arithmetic is float32, operation for operation that of torchao's observers, so that the same
range gives the same bits; where theirs overflows (a range wider than float32's largest value)
this one does not.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantplug.core.errors import ConfigError

INTEGER_DTYPES = (
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.qint8,
    torch.quint8,
    torch.qint32,
)
_PER_TENSOR = (torch.per_tensor_affine, torch.per_tensor_symmetric)
PER_CHANNEL = (torch.per_channel_affine, torch.per_channel_symmetric, torch.per_channel_affine_float_qparams)
_SYMMETRIC = (torch.per_tensor_symmetric, torch.per_channel_symmetric)
_MIDPOINT = {torch.uint8: 128, torch.quint8: 128, torch.uint16: 2**15}


@dataclass(frozen=True)
class Scheme:
    """How a range becomes a scale and a zero point.

    Attributes:
        quant_min: smallest integer used.
        quant_max: largest integer used.
        symmetric: the zero point is fixed and the range is widened to be symmetric about 0.
        zero: the fixed zero point of a symmetric scheme.
        eps: smallest scale.
        power_of_two: scales are rounded up to powers of two (Jain et al., "Trained Quantization
            Thresholds", arXiv:1903.08066, section 3.3), so that kernels rescale by shifting.
        float_zero: zero points are floats, not rounded (the scheme of quantized embeddings).
    """

    quant_min: int
    quant_max: int
    symmetric: bool
    zero: int
    eps: float
    power_of_two: bool = False
    float_zero: bool = False

    @property
    def steps(self) -> int:
        """Number of steps between the smallest and the largest integer."""
        return self.quant_max - self.quant_min

    def qparams(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Returns float32 scales and int64 zero points of float32 ranges, all of one shape.

        Every scale is finite and at least `eps`; real zero is representable.
        """
        if self.float_zero:
            return self._float_qparams(low, high)
        low, high = low.clamp(max=0), high.clamp(min=0)
        if self.symmetric:
            scale = self._rounded(torch.maximum(-low, high) / (float(self.steps) / 2))
            return scale, torch.full_like(scale, self.zero, dtype=torch.int64)
        # Halved ends keep the difference of two huge values finite; halving changes no other bit.
        scale = self._rounded((high / 2 - low / 2) / (float(self.steps) / 2))
        zero = self.quant_min - torch.round(low / scale).to(torch.int64)
        return scale, zero.clamp(self.quant_min, self.quant_max)

    def _rounded(self, scale: Tensor) -> Tensor:
        scale = scale.clamp(min=torch.tensor(self.eps, dtype=torch.float32).item(), max=torch.finfo(torch.float32).max)
        if not self.power_of_two:
            return scale
        mantissa, exponent = torch.frexp(scale)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(max=127)
        return torch.ldexp(torch.ones_like(scale), exponent)

    def _float_qparams(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        scale = (high / 2 - low / 2) / (float(self.steps) / 2)
        scale = torch.where(scale > self.eps, scale, torch.ones_like(scale))
        return scale, -low / scale


def scheme_of(
    dtype: torch.dtype,
    qscheme: torch.qscheme,
    quant_min: int | None,
    quant_max: int | None,
    reduce_range: bool,
    eps: float,
    power_of_two: bool,
    where: str,
) -> Scheme:
    """Returns the scheme that the options of an observer, named as `where` says, ask for.

    Raises:
        ConfigError: an option is out of its domain.
    """
    if not (0 < eps < float("inf")):
        raise ConfigError(f"{where} has eps {eps}; pass a positive smallest scale, such as 2**-12.")
    low, high = integer_range(dtype, quant_min, quant_max, reduce_range, where)
    symmetric, declared = qscheme in _SYMMETRIC, quant_min is not None or quant_max is not None or reduce_range
    zero = symmetric_zero(dtype, low, high, declared) if symmetric else 0
    return Scheme(low, high, symmetric, zero, eps, power_of_two, qscheme == torch.per_channel_affine_float_qparams)


def checked_qscheme(qscheme: torch.qscheme | None, per_channel: bool, where: str) -> torch.qscheme:
    """Returns torch's scheme for a range for each channel, or for the whole tensor; by default the affine one.

    Raises:
        ConfigError: the scheme is for the other one.
    """
    allowed = PER_CHANNEL if per_channel else _PER_TENSOR
    if qscheme is not None and qscheme not in allowed:
        raise ConfigError(f"{where} has qscheme {qscheme}; choose one of {[str(s) for s in allowed]}.")
    return qscheme or allowed[0]


def integer_range(
    dtype: torch.dtype, quant_min: int | None, quant_max: int | None, reduce_range: bool, where: str
) -> tuple[int, int]:
    """Returns the integers an observer may use: the declared ones within the dtype's, halved if reduced.

    Args:
        dtype: integer type of the quantized tensor.
        quant_min: smallest integer, None for the dtype's.
        quant_max: largest integer, None for the dtype's.
        reduce_range: drops one bit (0..127 for uint8), so that pairs of 8-bit products fit into the
            16-bit accumulators of x86's vpmaddubsw.
        where: name of the observer, for the message.

    Raises:
        ConfigError: the dtype is no integer type, or the range does not fit into it or leaves out 0.
    """
    if dtype not in INTEGER_DTYPES:
        raise ConfigError(f"{where} has dtype {dtype}; choose one of {[str(d) for d in INTEGER_DTYPES]}.")
    bounds = torch.iinfo(dtype)
    low = bounds.min if quant_min is None else quant_min
    high = bounds.max if quant_max is None else quant_max
    if not (bounds.min <= low <= 0 <= high <= bounds.max and low < high):
        raise ConfigError(
            f"{where} has quant_min {low} and quant_max {high}; change them, a range of {dtype} lies within "
            f"{bounds.min}..{bounds.max} and holds 0."
        )
    return (_halved(low), _halved(high)) if reduce_range else (low, high)


def symmetric_zero(dtype: torch.dtype, quant_min: int, quant_max: int, explicit: bool) -> int:
    """Returns the zero point of a symmetric scheme: 0 where signed, else the middle of the range.

    Args:
        dtype: integer type.
        quant_min: smallest integer used.
        quant_max: largest integer used.
        explicit: the range was declared, so its own middle (rounded down) counts, as in torchao.
    """
    if dtype not in _MIDPOINT:
        return 0
    return (quant_min + quant_max) // 2 if explicit else _MIDPOINT[dtype]


def _halved(bound: int) -> int:
    return bound // 2 if bound >= 0 else -(-bound // 2)
