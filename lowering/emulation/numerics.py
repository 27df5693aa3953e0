"""The arithmetic of an integer kernel as values: how wide it accumulates, and how a sum becomes 8 bits again.

Before: products of integers. After: integers of the output, one number for each detail in which real
hardware differs: the accumulator's type, wrapping or saturating, and the requantization.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from quantplug.core.errors import ConfigError

# (accumulators, real value of one unit of them in steps of the output) -> integers before the zero point
Requantize: TypeAlias = Callable[[Tensor, Tensor], Tensor]

_INTEGERS = (torch.int16, torch.int32, torch.int64)
_ACCUMULATORS = (*_INTEGERS, torch.float16, torch.float32)


def float_round_even(accumulator: Tensor, ratio: Tensor) -> Tensor:
    """Multiplies in float32 and rounds to the nearest integer, ties to even.

    What XNNPACK's "fp32" kernels do (`src/qs8-gemm`, `src/qs8-igemm`, requantization "fp32"): the sum is
    converted to float32 first, so sums beyond 2^24 lose their lowest bits there too.

    Args:
        accumulator: sums, integers or floats.
        ratio: float32, input scale x weight scale / output scale; of a shape that broadcasts.
    """
    return (accumulator.to(torch.float32) * ratio).round_()


@dataclass(frozen=True)
class FixedPoint:
    """Multiplies by an integer and shifts right; half a step is added first, so ties go up.

    The multiplier is the ratio's mantissa in `bits` bits, the shift its exponent (Jacob et al. 2018,
    "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference").

    Attributes:
        bits: of the multiplier, sign excluded; 31 and 15 are usual.
    """

    bits: int = 31

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 31:
            raise ConfigError(f"A fixed-point multiplier has 1 to 31 bits, found {self.bits}; pass bits=31 or 15.")

    def __call__(self, accumulator: Tensor, ratio: Tensor) -> Tensor:
        """Returns the rounded product as int64 (32 bits times 31 bits fit)."""
        mantissa, exponent = torch.frexp(ratio.to(torch.float64))
        multiplier = torch.ldexp(mantissa, torch.tensor(self.bits)).round().to(torch.int64)
        # a ratio of 2^bits and more would shift left; no kernel scales its sums up so far
        shift = (self.bits - exponent).clamp(1, 62).to(torch.int64)
        half = torch.bitwise_left_shift(torch.ones_like(shift), shift - 1)
        return torch.bitwise_right_shift(accumulator.to(torch.int64) * multiplier + half, shift)


@dataclass(frozen=True)
class Numerics:
    """How a kernel adds products up and scales the sum.

    Attributes:
        accumulator: int32, int16, int64 (which holds what accumulators of 48 bits do), float16 or float32.
        saturate: whether every single addition stops at the accumulator's limits; else integers wrap around
            (floats become infinite).
        requantize: from sums to integers of the output, before its zero point is added.
        ratios: in what the ratio of the scales is computed.
    """

    accumulator: torch.dtype = torch.int32
    saturate: bool = False
    requantize: Requantize = float_round_even
    ratios: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.accumulator not in _ACCUMULATORS:
            choices = [str(dtype) for dtype in _ACCUMULATORS]
            raise ConfigError(f"An accumulator of {self.accumulator} is not emulated; choose one of {choices}.")

    def ratio(self, *factors: Any, out: Any) -> Tensor:
        """Returns the product of scales over that of an output, in the format of `ratios`.

        Args:
            factors: scales of what is multiplied: numbers, or tensors of one for each channel.
            out: the scale of the result, likewise.
        """
        numbers = [torch.as_tensor(factor).to(torch.float64).to(self.ratios) for factor in (*factors, out)]
        return math.prod(numbers[1:-1], start=numbers[0]) / numbers[-1]

    @property
    def is_order_free(self) -> bool:
        """Tells whether the sum is the same in every order: integers that wrap around."""
        return self.accumulator in _INTEGERS and not self.saturate

    def wrap(self, exact: Tensor) -> Tensor:
        """Returns sums known exactly (as float64) in an integer accumulator that wraps around."""
        return exact.to(torch.int64).to(self.accumulator)

    def add(self, accumulator: Tensor, product: Tensor) -> Tensor:
        """Returns an accumulator after one more product; both hold values of the accumulator's type.

        A product of two 8-bit integers is exact and rounded only in the sum, as a fused multiply-add does.

        Args:
            accumulator: int64 for integer types, float32 for float types.
            product: of the same dtype.
        """
        total = accumulator + product
        if self.accumulator in _INTEGERS:
            limits = torch.iinfo(self.accumulator)
            return total.clamp(limits.min, limits.max) if self.saturate else self.wrap(total).to(total.dtype)
        # integers below 2^24 and float16 values of the same size add exactly in float32: rounded once, here
        rounded = total.to(self.accumulator).to(total.dtype)
        limit = torch.finfo(self.accumulator).max
        return rounded.clamp(-limit, limit) if self.saturate else rounded

    @property
    def working_dtype(self) -> torch.dtype:
        """The dtype that `add` computes in."""
        return torch.int64 if self.accumulator in _INTEGERS else torch.float32
