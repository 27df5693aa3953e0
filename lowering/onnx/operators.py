"""Operators that stand in a graph of torch for one of ONNX that torch has none for.

Before: nothing. After: `torch.ops.quantplug_onnx` has them, with their numbers, so that export traces them and a
translation finds them.
"""

import torch
from torch import Tensor


@torch.library.custom_op("quantplug_onnx::clip", mutates_args=())
def clip(integers: Tensor, low: int, high: int) -> Tensor:
    """Returns integers of 8 bits between two bounds."""
    return integers.clamp(low, high)


@clip.register_fake
def _(integers: Tensor, low: int, high: int) -> Tensor:
    return torch.empty_like(integers)


@torch.library.custom_op("quantplug_onnx::dequantize_groups", mutates_args=())
def dequantize_groups(integers: Tensor, scales: Tensor, axis: int, size: int) -> Tensor:
    """Returns integers times the scale of their group along an axis."""
    return integers * scales.repeat_interleave(size, axis)


@dequantize_groups.register_fake
def _(integers: Tensor, scales: Tensor, axis: int, size: int) -> Tensor:
    return torch.empty_like(integers, dtype=scales.dtype)


@torch.library.custom_op("quantplug_onnx::dynamic_product", mutates_args=())
def dynamic_product(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the product of what an activation is rounded to, in 8 bits of its own range, and integers [in, out]."""
    low, high = x.min().clamp(max=0), x.max().clamp(min=0)
    scale = ((high - low) / 255).clamp(min=torch.finfo(torch.float32).tiny)
    zero = (-low / scale).round()
    total = (((x / scale).round() + zero).clamp(0, 255) - zero) @ weight.to(x.dtype) * (scale * scales)
    return total if bias is None else total + bias


@dynamic_product.register_fake
def _(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[1])
