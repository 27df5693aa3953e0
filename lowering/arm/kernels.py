"""The arithmetic of TOSA's operators on integers, as ExecuTorch's passes put them together.

Before: the quantization parameters around an operator. After: a module that computes what its TOSA operators compute.
Sources: TOSA specification 1.0 (`apply_scale_32`, `apply_scale_16`, `reciprocal_scale`, TABLE, AVG_POOL2D), and where
RESCALE stands and with which scales, ExecuTorch 1.4's `backends/arm/_passes` (the file stands at each kernel). Each is
held against TOSA's reference model by the tests.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quantplug.core.qdq.qparams import QParams
from quantplug.lowering.emulation.kernels import Kernel, zero
from quantplug.lowering.emulation.numerics import FixedPoint, Numerics

# Sums of 8 bits are scaled by 31 bits; those of 16 bits are 48 wide, and scaled by 15.
BYTES = Numerics(requantize=FixedPoint(31), ratios=torch.float64)
WIDE = Numerics(accumulator=torch.int64, requantize=FixedPoint(15), ratios=torch.float64)
# By how much operands of a sum are raised before they are scaled.
_HEADROOM = {torch.int8: 20, torch.int16: 12}
_RESCALE = FixedPoint(31)


def whole(out: QParams) -> QParams:
    """Returns the parameters of a result that ends where its dtype does: RESCALE knows no other range."""
    limits = torch.iinfo(out.dtype)
    return replace(out, quant_min=limits.min, quant_max=limits.max)


def rescaled(integers: Tensor, ratio: float) -> Tensor:
    """Returns RESCALE of integers without zero points: 31 bits of the ratio, ties up."""
    return _RESCALE(integers, torch.tensor(ratio, dtype=torch.float64))


def _scale(params: QParams) -> float:
    assert isinstance(params.scale, float)
    return params.scale


class Rescale(Kernel):
    """One scale for another (`insert_rescales_pass.py`)."""

    def __init__(self, entered: QParams, out: QParams) -> None:
        super().__init__(whole(out))
        self.zero_point, self.ratio = zero(entered), _scale(entered) / _scale(out)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the integers in the other scale."""
        return self.finish(rescaled(x.to(torch.int64) - self.zero_point, self.ratio) + zero(self.out))


class Pair(Kernel):
    """An operator of two tensors in 32 bits, between RESCALEs of its operands and its result."""

    def __init__(self, operator: Callable[..., Tensor], read: Sequence[QParams], step: float, out: QParams) -> None:
        """Keeps what the operator reads.

        Args:
            operator: of integers of 32 bits.
            read: the parameters of both operands.
            step: the scale that both are brought to; the result has it too.
            out: the parameters of the result.
        """
        super().__init__(whole(out))
        self.operator, self.zeros = operator, [zero(each) for each in read]
        self.ratios, self.last = [_scale(each) / step for each in read], step / _scale(out)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        """Returns the operator of two tensors of integers, broadcast."""
        parts = zip((one, other), self.zeros, self.ratios, strict=True)
        operands = [rescaled(x.to(torch.int64) - zero_point, ratio) for x, zero_point, ratio in parts]
        return self.finish(rescaled(self.operator(*operands), self.last) + zero(self.out))


def sum_or_difference(operator: Callable[..., Tensor], read: Sequence[QParams], out: QParams) -> Pair:
    """Returns add or sub: operands are raised by 20 bits, 12 of 16-bit ones (`insert_rescales_pass.py`)."""
    step = 2 * max(map(_scale, read)) / (1 << _HEADROOM[out.dtype])
    return Pair(operator, read, step, out)


def comparison(operator: Callable[..., Tensor], read: Sequence[QParams], out: QParams) -> Pair:
    """Returns maximum or minimum: operands are in the finer of their scales (`insert_rescales_pass.py`)."""
    return Pair(operator, read, min(map(_scale, read)), out)


class Multiplication(Kernel):
    """An elementwise product of 32 bits, scaled once (`insert_rescales_pass.py`)."""

    def __init__(self, one: QParams, other: QParams, out: QParams) -> None:
        super().__init__(whole(out))
        self.zeros, self.ratio = (zero(one), zero(other)), _scale(one) * _scale(other) / _scale(out)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        """Returns the product of two integer tensors, broadcast."""
        product = (one.to(torch.int64) - self.zeros[0]) * (other.to(torch.int64) - self.zeros[1])
        return self.finish(rescaled(product, self.ratio) + zero(self.out))


class MatrixProduct(Kernel):
    """A product of two matrices, or of as many as a batch has (`rewrite_matmul.py`)."""

    ratio: Tensor

    def __init__(self, one: QParams, other: QParams, out: QParams) -> None:
        super().__init__(whole(out))
        self.numerics = BYTES if out.dtype == torch.int8 else WIDE
        self.zeros = (zero(one), zero(other))
        self.register_buffer("ratio", self.numerics.ratio(_scale(one), _scale(other), out=_scale(out)))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        """Returns the product of two integer tensors."""
        centred = (x.to(torch.float64) - z for x, z in zip((one, other), self.zeros, strict=True))
        sums = self.numerics.wrap(torch.matmul(*centred))
        return self.finish(self.numerics.requantize(sums, self.ratio) + zero(self.out))


class Averages(Kernel):
    """AVG_POOL2D: a sum of what lies under a window, times a reciprocal of their number in fixed point.

    ExecuTorch 1.4 quantizes the two zero points as if they were numbers of the tensor (`rewrite_avg_pool2d_pass.py`
    makes them before constants are quantized), mostly to the least or greatest integer. Both are equal, so that all
    that depends on it is to which side ties go.
    """

    def __init__(self, window: Sequence[Any], counts_padding: bool, entered: QParams, out: QParams) -> None:
        """Keeps the window.

        Args:
            window: size, stride and padding of both dimensions.
            counts_padding: whether padding counts; it is zeros in front of the operator then.
            entered: the parameters of the input.
            out: those of the result, of the same scale.
        """
        super().__init__(whole(out))
        self.window, self.counts_padding, self.zero_point = window, counts_padding, zero(entered)
        self.stored = int(_quantized(torch.tensor(float(zero(entered))), entered))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the averages of integers."""
        size, stride, padding = self.window
        given = {"kernel_size": size, "stride": stride, "padding": padding, "divisor_override": 1}
        ones = torch.ones((1, *x.shape[1:]), dtype=torch.float64)
        windows = F.avg_pool2d(ones, **given).to(torch.int64)
        counts = torch.full_like(windows, math.prod(size)) if self.counts_padding else windows
        sums = F.avg_pool2d(x.to(torch.float64) - self.zero_point, **given).to(torch.int64)
        moved = self.zero_point - self.stored
        return self.finish(_over(sums + counts * moved, counts) + self.stored)


def _over(sums: Tensor, counts: Tensor) -> Tensor:
    """Returns sums over counts, by TOSA's `reciprocal_scale`: 30 bits and one more for each of the count's."""
    bits = torch.frexp((counts - 1).to(torch.float64))[1].to(torch.int64)
    multiplier = torch.bitwise_left_shift(torch.full_like(counts, (1 << 30) + 1), bits) // counts
    shift = 30 + bits
    half = torch.bitwise_left_shift(torch.ones_like(shift), shift - 1)
    return torch.bitwise_right_shift(sums * multiplier + half, shift)


class Total(Kernel):
    """REDUCE_SUM of 32 bits, scaled once (`insert_rescales_pass.py`)."""

    def __init__(self, along: tuple[Any, bool], entered: QParams, out: QParams) -> None:
        """Keeps the dimensions.

        Args:
            along: the dimensions, and whether they stay.
            entered: the parameters of the input.
            out: those of the result.
        """
        super().__init__(whole(out))
        self.along, self.zero_point, self.ratio = along, zero(entered), _scale(entered) / _scale(out)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the sums of integers."""
        sums = (x.to(torch.int64) - self.zero_point).sum(*self.along)
        return self.finish(rescaled(sums, self.ratio) + zero(self.out))


class Extreme(Kernel):
    """REDUCE_MAX or REDUCE_MIN of integers in one scale."""

    def __init__(self, operator: Callable[..., Tensor], along: tuple[Any, bool], out: QParams) -> None:
        super().__init__(whole(out))
        self.operator, self.along = operator, along

    def forward(self, x: Tensor) -> Tensor:
        """Returns the greatest or least integers."""
        return self.operator(x, *self.along)


class Table(Kernel):
    """TABLE: a function of 8 bits by its 256 results, of 16 bits by 513 and lines between (`insert_table_ops.py`)."""

    table: Tensor

    def __init__(self, function: Callable[[Tensor], Tensor], entered: QParams, out: QParams) -> None:
        super().__init__(out if out.dtype == torch.int8 else whole(out))
        self.is_wide = out.dtype == torch.int16
        least = torch.iinfo(entered.dtype).min
        points = torch.arange(least, -least + 1, 128) if self.is_wide else torch.arange(least, -least)
        # The last point of 16 bits lies beyond them, and is taken for the one before it.
        points = points.clamp(max=-least - 128) if self.is_wide else points.clamp(entered.quant_min, entered.quant_max)
        self.first, values = least, function(_dequantized(points, entered))
        self.register_buffer("table", _quantized(values, out).to(torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """Returns what the table says of integers."""
        place = x.to(torch.int64) - self.first
        if not self.is_wide:
            return self.finish(self.table[place])
        index, rest = place >> 7, place & 127
        low, high = self.table[index], self.table[index + 1]
        return self.finish(rescaled(low * 128 + (high - low) * rest, 2.0**-7))


def _dequantized(integers: Tensor, params: QParams) -> Tensor:
    found: Tensor = torch.ops.quantized_decomposed.dequantize_per_tensor(integers.to(params.dtype), *params.args())
    return found


def _quantized(values: Tensor, params: QParams) -> Tensor:
    found: Tensor = torch.ops.quantized_decomposed.quantize_per_tensor(values, *params.args())
    return found


class Bounds(Kernel):
    """CLAMP of integers in one scale (`fold_qdq_with_annotated_qparams_pass.py`)."""

    def __init__(self, bounds: tuple[float | None, float | None], out: QParams) -> None:
        super().__init__(whole(out))
        low, high = (None if each is None else int(_quantized(torch.tensor(float(each)), out)) for each in bounds)
        self.bound(self.low if low is None else low, self.high if high is None else high)

    def forward(self, x: Tensor) -> Tensor:
        """Returns integers within the bounds."""
        return self.finish(x)
