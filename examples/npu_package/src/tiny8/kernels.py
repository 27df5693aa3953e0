"""The kernels of tiny8: int8 in, sums in int32, one multiplication by an integer, one rounding, int8 out.

A ratio of scales is `multiplier / 2**shift` with a multiplier of 24 bits; beside 32 bits of a sum, 64 bits hold all.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def scaled(ratio: float, bits: int = 24) -> tuple[int, int]:
    """Returns multiplier and shift of a ratio of scales."""
    shift = bits - math.frexp(ratio)[1]
    return round(math.ldexp(ratio, shift)), shift


def scaled_alike(*ratios: float) -> tuple[list[int], int]:
    """Returns the multipliers of several ratios and the shift that they share."""
    shift = min(scaled(ratio)[1] for ratio in ratios)
    return [round(math.ldexp(ratio, shift)) for ratio in ratios], shift


def scaled_by_channel(ratios: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the multiplier and the divisor of each channel."""
    multipliers, shifts = zip(*map(scaled, ratios.tolist()), strict=True)
    return torch.tensor(multipliers), 2 ** torch.tensor(shifts)


def _kernel(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Registers a function as an operator; what it does to shapes, it does to fake tensors too."""
    operator = torch.library.custom_op(f"tiny8::{function.__name__}", function, mutates_args=())
    operator.register_fake(function)
    return operator


def _rounded(sums: Tensor, multiplier: Tensor | int, divisor: Tensor | int, zero_point: int, low: int) -> Tensor:
    """Requantizes: a product, a division that rounds half up, the zero point, saturation."""
    steps = torch.div(sums.long() * multiplier + divisor // 2, divisor, rounding_mode="floor")
    return torch.clamp(steps + zero_point, low, 127).to(torch.int8)


@_kernel
def conv2d(
    x: Tensor, weight: Tensor, bias: Tensor, multipliers: Tensor, divisors: Tensor, zero_points: list[int], low: int,
    stride: list[int], padding: list[int], dilation: list[int], groups: int,
) -> Tensor:  # fmt: skip
    """Convolves int8 with int8; the bias is int32 in steps of the sums."""
    sizes = [(size - 1) * step + 1 for size, step in zip(weight.shape[2:], dilation, strict=True)]
    spread = weight.new_zeros((*weight.shape[:2], *sizes), dtype=torch.int32)
    spread[..., :: dilation[0], :: dilation[1]] = weight
    sums = F.conv2d(x.int() - zero_points[0], spread, bias, stride, padding, 1, groups)
    return _rounded(sums, multipliers.view(-1, 1, 1), divisors.view(-1, 1, 1), zero_points[1], low)


@_kernel
def linear(
    x: Tensor, weight: Tensor, bias: Tensor, multipliers: Tensor, divisors: Tensor, zero_points: list[int], low: int
) -> Tensor:
    """Multiplies int8 by int8; the bias is int32 in steps of the sums."""
    sums = F.linear(x.int() - zero_points[0], weight.int(), bias)
    return _rounded(sums, multipliers, divisors, zero_points[1], low)


@_kernel
def add(one: Tensor, other: Tensor, multipliers: list[int], shift: int, zero_points: list[int], low: int) -> Tensor:
    """Adds in steps of 2**-shift of the output's."""
    first, second = ((x.long() - z) * m for x, z, m in zip((one, other), zero_points, multipliers, strict=False))
    return _rounded(first + second, 1, 1 << shift, zero_points[2], low)


@_kernel
def mul(one: Tensor, other: Tensor, multiplier: int, shift: int, zero_points: list[int], low: int) -> Tensor:
    """Multiplies int8 by int8."""
    product = (one.int() - zero_points[0]) * (other.int() - zero_points[1])
    return _rounded(product, multiplier, 1 << shift, zero_points[2], low)


@_kernel
def mean(x: Tensor, dim: list[int], keepdim: bool, multiplier: int, shift: int, zero_points: list[int]) -> Tensor:
    """Sums in int32 and divides once, by the count and the ratio of scales together."""
    dims = dim or list(range(x.dim()))
    sums = (x.int() - zero_points[0]).sum(dims, keepdim=keepdim, dtype=torch.int32)
    return _rounded(sums, multiplier, math.prod(x.shape[d] for d in dims) << shift, zero_points[1], -128)


@_kernel
def sigmoid(x: Tensor, table: Tensor) -> Tensor:
    """Looks each integer up in a table of 256."""
    return table.take(x.long() + 128)


@_kernel
def max_pool2d(
    x: Tensor, kernel_size: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil_mode: bool
) -> Tensor:
    """Compares integers of one scale."""
    return F.max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode)


@_kernel
def cat(tensors: list[Tensor], dim: int) -> Tensor:
    """Joins integers of one scale."""
    return torch.cat(tensors, dim)
