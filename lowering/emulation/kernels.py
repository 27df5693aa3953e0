"""Integer kernels as modules: integers in, integers out, their constants as buffers.

Before: the quantization parameters around an operator of a q/dq graph. After: a module that computes the
same operator as a target's kernel does. All of them are made of ATen operators, so a graph of them is
exported and saved like any other.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quantplug.core.qdq.qparams import QParams
from quantplug.lowering.emulation.numerics import Numerics


class Kernel(nn.Module):
    """A kernel with one quantized output.

    Attributes:
        low: lowest integer that it yields.
        high: highest integer that it yields.
    """

    def __init__(self, out: QParams) -> None:
        super().__init__()
        self.out, self.low, self.high = out, out.quant_min, out.quant_max

    def bound(self, low: int, high: int) -> None:
        """Narrows the output: a clamp that the kernel takes along."""
        self.low, self.high = max(self.low, low), min(self.high, high)

    def finish(self, integers: Tensor) -> Tensor:
        """Returns integers that the zero point is in already, within bounds and in the output's dtype."""
        return integers.clamp(self.low, self.high).to(self.out.dtype)

    def extra_repr(self) -> str:
        """Shows what a printed graph should say."""
        return f"out={self.out}, bounds=({self.low}, {self.high})"


def float32(number: Any) -> Tensor:
    """Returns a number as a float32 scalar, which C kernels hold scales in."""
    return torch.tensor(number, dtype=torch.float32)


def zero(params: QParams) -> int:
    """Returns the zero point of static parameters."""
    assert isinstance(params.zero_point, int)
    return params.zero_point


def real(integers: Tensor, params: QParams) -> Tensor:
    """Returns the float32 values that integers stand for."""
    return (integers.to(torch.int32) - zero(params)).to(torch.float32) * float32(params.scale)


class Quantize(Kernel):
    """Float to integers: x times the float32 reciprocal of the scale, rounded to even, then the zero point.

    XNNPACK (`f32-qs8-vcvt`, scale = 1.0f / output scale). torch's operator rounds the reciprocal of the
    double instead, which is another float32 for a quarter of all scales.
    """

    reciprocal: Tensor

    def __init__(self, out: QParams) -> None:
        super().__init__(out)
        self.register_buffer("reciprocal", float32(1.0) / float32(out.scale))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the integers of a float tensor."""
        return self.finish((x * self.reciprocal).round() + zero(self.out))


class Elementwise(Kernel):
    """A function of dequantized operands, quantized again; the zero point is added before rounding.

    XNNPACK's reference kernels (`src/reference/unary-elementwise.cc`, `binary-elementwise.cc`): float32 throughout.
    """

    reciprocal: Tensor

    def __init__(self, function: Callable[..., Tensor], inputs: Sequence[QParams], out: QParams) -> None:
        super().__init__(out)
        self.function, self.inputs = function, tuple(inputs)
        self.register_buffer("reciprocal", float32(1.0) / float32(out.scale))

    def forward(self, *operands: Tensor) -> Tensor:
        """Returns the function of integers as integers."""
        y = self.function(*(real(q, params) for q, params in zip(operands, self.inputs, strict=True)))
        return self.finish((y * self.reciprocal + zero(self.out)).round())


class Lookup(Kernel):
    """A function of one operand as a table of its 256 results."""

    table: Tensor

    def __init__(self, function: Callable[[Tensor], Tensor], entered: QParams, out: QParams) -> None:
        super().__init__(out)
        self.first = torch.iinfo(entered.dtype).min
        every = torch.arange(self.first, self.first + 256, dtype=torch.int32)
        self.register_buffer("table", Elementwise(function, [entered], out)(every))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the table's entries for integers."""
        return self.table[x.to(torch.int64) - self.first].clamp(self.low, self.high)


class Sum(Kernel):
    """A sum or difference of two integers in fixed point: 20 bits of the greater ratio, ties rounded up.

    XNNPACK (`qs8-vadd`, `xnn_init_qs8_add_minmax_scalar_params`): both ratios become multipliers with one
    common shift, so that the greater has its highest bit at 2^20.
    """

    def __init__(self, one: QParams, other: QParams, out: QParams, sign: int) -> None:
        super().__init__(out)
        ratios = torch.stack([float32(one.scale) / float32(out.scale), float32(other.scale) / float32(out.scale)])
        _, exponent = torch.frexp(ratios.max())
        self.shift = 21 - int(exponent)
        first, second = torch.ldexp(ratios.double(), torch.tensor(self.shift)).round().long().tolist()
        self.multipliers = (first, sign * second)
        zeros = (zero(one), zero(other))
        self.bias = (1 << (self.shift - 1)) - sum(m * z for m, z in zip(self.multipliers, zeros, strict=True))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        """Returns the sum of two integer tensors, broadcast."""
        first, second = self.multipliers
        total = one.to(torch.int64) * first + other.to(torch.int64) * second + self.bias
        return self.finish((total >> self.shift) + zero(self.out))


class Multiplication(Kernel):
    """A product of two integers, scaled like the sums of a convolution."""

    ratio: Tensor

    def __init__(self, one: QParams, other: QParams, out: QParams, numerics: Numerics) -> None:
        super().__init__(out)
        self.zeros, self.numerics = (zero(one), zero(other)), numerics
        self.register_buffer("ratio", numerics.ratio(one.scale, other.scale, out=out.scale))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        """Returns the product of two integer tensors, broadcast."""
        product = (one.to(torch.int32) - self.zeros[0]) * (other.to(torch.int32) - self.zeros[1])
        return self.finish(self.numerics.requantize(product, self.ratio) + zero(self.out))


class Slopes(Kernel):
    """A line of one slope above zero and another below: leaky relu, in 8 fractional bits, ties rounded up.

    XNNPACK (`qs8-vlrelu`): multipliers are 256 times the ratios, rounded to even.
    """

    def __init__(self, slope: float, entered: QParams, out: QParams) -> None:
        super().__init__(out)
        self.zero_point = zero(entered)
        ratio = float32(entered.scale) / float32(out.scale)
        self.above, self.below = (int((256 * r).round()) for r in (ratio, ratio * float32(slope)))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the scaled integers."""
        distance = x.to(torch.int32) - self.zero_point
        scaled = distance * torch.where(distance > 0, self.above, self.below)
        return self.finish(((scaled + 128) >> 8) + zero(self.out))


class Mean(Kernel):
    """A mean over dimensions: an integer sum, scaled once; the zero point is added before rounding.

    XNNPACK (`src/operators/reduce-nd.c`): the ratio of the scales times the reciprocal of the number of elements.
    """

    ratio: Tensor

    def __init__(self, dims: Sequence[int], keepdim: bool, entered: QParams, out: QParams) -> None:
        super().__init__(out)
        self.dims, self.keepdim, self.zero_point = list(dims), keepdim, zero(entered)
        self.register_buffer("ratio", float32(entered.scale) / float32(out.scale))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the mean of integers as integers."""
        total = (x.to(torch.int32) - self.zero_point).sum(self.dims, self.keepdim, dtype=torch.int32)
        count = 1
        for dim in self.dims:
            count *= x.shape[dim]
        return self.finish((total.to(torch.float32) * (self.ratio * (1.0 / count)) + zero(self.out)).round())
