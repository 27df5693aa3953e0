"""Q/dq graphs written by hand, so that a test says exactly which construct it lowers."""

from collections.abc import Callable
from typing import Any

import torch
import torchao.quantization.pt2e  # noqa: F401  registers torch.ops.quantized_decomposed
from torch import Tensor, fx, nn

Q = torch.ops.quantized_decomposed
FULL = (-128, 127, torch.int8)
A = (0.03, -3)
B = (0.05, 4)


def fake(x: Tensor, qparams: tuple[float, int] = A, low: int = -128, high: int = 127, dtype=torch.int8) -> Tensor:
    """Quantizes and dequantizes with one scale."""
    return Q.dequantize_per_tensor(Q.quantize_per_tensor(x, *qparams, low, high, dtype), *qparams, low, high, dtype)


def dynamic(x: Tensor) -> Tensor:
    """Quantizes and dequantizes with a scale chosen at run time."""
    scale, zero_point = Q.choose_qparams.tensor(x, -128, 127, 1e-6, torch.int8)
    return Q.dequantize_per_tensor.tensor(
        Q.quantize_per_tensor.tensor(x, scale, zero_point, *FULL), scale, zero_point, *FULL
    )


class Weight(nn.Module):
    """An integer weight that is dequantized per channel."""

    integers: Tensor
    scales: Tensor

    def __init__(self, *shape: int, axis: int = 0, zero_points: bool = False, bits: int = 8):
        super().__init__()
        top = 2 ** (bits - 1) - 1
        float_weight = torch.randn(*shape) * 0.2
        others = [d for d in range(len(shape)) if d != axis]
        view = [-1 if d == axis else 1 for d in range(len(shape))]
        zeros = torch.arange(shape[axis]) % 7 - 3 if zero_points else torch.zeros(shape[axis], dtype=torch.int64)
        self.axis, self.limits = axis, (-top - 1, top)
        self.register_buffer("scales", float_weight.abs().amax(others) / top)
        self.register_buffer("zeros", zeros)
        integers = (float_weight / self.scales.view(view)).round() + zeros.view(view)
        self.register_buffer("integers", integers.clamp(*self.limits).to(torch.int8))

    def forward(self) -> Tensor:
        return Q.dequantize_per_channel(self.integers, self.scales, self.zeros, self.axis, *self.limits, torch.int8)


class TensorWeight(nn.Module):
    """An integer weight with one scale."""

    def __init__(self, *shape: int, zero_point: int = 0):
        super().__init__()
        float_weight = torch.randn(*shape) * 0.2
        self.scale, self.zero_point = float(float_weight.abs().max() / 127), zero_point
        integers = (float_weight / self.scale).round() + zero_point
        self.register_buffer("integers", integers.clamp(-128, 127).to(torch.int8))

    def forward(self) -> Tensor:
        return Q.dequantize_per_tensor(self.integers, self.scale, self.zero_point, *FULL)


class Net(nn.Module):
    """A function of named parts and inputs."""

    def __init__(self, function: Callable[..., object], **parts: Any):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, nn.Buffer(part) if isinstance(part, Tensor) else part)

    def forward(self, *inputs: Tensor) -> object:
        return self.function(self, *inputs)


def graph_of(net: nn.Module, *inputs: Tensor) -> fx.GraphModule:
    """Exports a q/dq module as `convert_pt2e` would hand it over."""
    return torch.export.export(net.eval(), inputs).module()


def decibels(found: Tensor, expected: Tensor) -> float:
    """Returns the signal-to-noise ratio of two tensors."""
    noise = (found.double() - expected.double()).square().sum()
    return float("inf") if noise == 0 else float(10 * torch.log10(expected.double().square().sum() / noise))
