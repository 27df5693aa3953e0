"""Fake quantizes without a range to learn: casts to half precision, and ranges that are found at run time.

Before: an observer in training whose quantization needs no data. After: a fake quantize that computes what the
operators compute that convert puts in its place; gradients pass as they are. There is nothing in it to freeze, so
`disable_observer` leaves it as it is: a range that stood still would be another model than the converted one.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torchao.quantization.pt2e import FakeQuantizeBase

from quantplug.core.errors import ConfigError

_OPS = torch.ops.quantized_decomposed
CHOOSE_QPARAMS: Mapping[torch.qscheme, Any] = {
    torch.per_tensor_affine: _OPS.choose_qparams.tensor,
    torch.per_tensor_symmetric: _OPS.choose_qparams_symmetric.tensor,
}


class HalfFakeQuantize(FakeQuantizeBase):
    """Rounds to a half type and back.

    Args:
        dtype: torch.float16 or torch.bfloat16.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.is_dynamic, self.has_data = dtype, False, True

    def forward(self, x: Tensor) -> Tensor:
        """Returns x as its half numbers stand for it, or x itself while fake quantization is disabled."""
        if self.fake_quant_enabled[0] == 0:
            return x
        return straight_through(x, x.detach().to(self.dtype).to(x.dtype))

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Returns the scale and zero point of a cast, which changes neither."""
        return torch.ones(1), torch.zeros(1, dtype=torch.int32)


class RunTimeFakeQuantize(FakeQuantizeBase):
    """Quantizes and dequantizes by the range of the tensor that comes.

    No value lies outside of a range that was just found, so that nothing is clipped.

    Args:
        dtype: the integers.
        quant_min: the least of them.
        quant_max: the greatest.
        qscheme: per tensor, affine or symmetric.
        eps: the least scale.
    """

    def __init__(self, dtype: torch.dtype, quant_min: int, quant_max: int, qscheme: torch.qscheme, eps: float) -> None:
        super().__init__()
        self.dtype, self.quant_min, self.quant_max = dtype, quant_min, quant_max
        self.qscheme, self.eps, self.is_dynamic = qscheme, eps, True

    def forward(self, x: Tensor) -> Tensor:
        """Returns x as its integers stand for it, or x itself while fake quantization is disabled."""
        if self.fake_quant_enabled[0] == 0 or not x.numel():
            return x
        with torch.no_grad():
            limits = (self.quant_min, self.quant_max)
            chosen = CHOOSE_QPARAMS[self.qscheme](x, *limits, self.eps, self.dtype)
            tail = (*chosen, *limits, self.dtype)
            integers = _OPS.quantize_per_tensor.tensor(x, *tail)
            rounded = _OPS.dequantize_per_tensor.tensor(integers, *tail, out_dtype=x.dtype)
        return straight_through(x, rounded)

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Raises, since there is no range before the program runs.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("A range of run time is chosen when the program runs; there is none to ask for before.")


class _StraightThrough(torch.autograd.Function):
    """The second value with the first one's gradient, bit for bit: x + (rounded - x) rounds once more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """Returns the second value, whose gradient passes to the first one as it is."""
    passed: Tensor = _StraightThrough.apply(x, rounded)  # type: ignore[no-untyped-call]
    return passed
