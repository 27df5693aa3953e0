"""Q/dq graphs that bring every kernel of a set to its limits: ties, odd zero points, narrow and wide scales.

Before: nothing. After: for each kernel, a piece of q/dq graph and inputs. Scales that are powers of two make
one result in two to four lie exactly between two integers, where all arithmetics that differ do differ.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torchao.quantization.pt2e import PerAxis, PerToken

from quantplug.core.observers.rowwise import quantize_dequantize
from quantplug.core.qdq.qparams import QD

INTEGER_OPERATORS = "means, clamps, embedding, data movement, max_pool2d"
Parameters = tuple[float, int]
Integers = tuple[int, int, torch.dtype]  # the lowest, the highest, their dtype
Function = Callable[["Operands"], Tensor]


@dataclass(frozen=True)
class Case:
    """A float function between quantized tensors.

    Attributes:
        row: the name of the kernel that it exercises.
        function: of quantized operands; weights are made on the way.
        weight: shape of the weight it needs, if any.
        axis: the weight's axis of output channels.
        is_float: whether the kernel yields float32, which nothing quantizes.
    """

    row: str
    function: Function
    weight: tuple[int, ...] | None = None
    axis: int = 0
    is_float: bool = False


@dataclass(frozen=True)
class Setting:
    """Quantization parameters of the operands and of all outputs.

    Attributes:
        x: of the first operand.
        y: of the second.
        zero_point: of the outputs.
        is_tie_prone: whether scales are powers of two.
    """

    x: Parameters
    y: Parameters
    zero_point: int
    is_tie_prone: bool


SETTINGS = (
    Setting((2.0**-5, -3), (2.0**-4, 5), 5, True),
    Setting((0.0317, 11), (0.0511, -7), -9, False),
)


@dataclass(frozen=True)
class Operands:
    """What a case computes with, all quantized but the bias.

    Attributes:
        x: an image.
        y: another image.
        positive: an image of positive numbers, with the scale of x.
        line: the first image as one line, with the scale of x.
        channel: one number for each channel, with the scale of y.
        weight: of the case's own shape.
        bias: float, one number for each channel of the weight.
    """

    x: Tensor
    y: Tensor
    positive: Tensor
    line: Tensor
    channel: Tensor
    weight: Tensor
    bias: Tensor


class _Weight(nn.Module):
    def __init__(self, case: Case, is_tie_prone: bool) -> None:
        super().__init__()
        shape = case.weight or (1,)
        channels = shape[case.axis]
        scales = torch.full((channels,), 2.0**-9) if is_tie_prone else torch.rand(channels) * 0.003 + 0.001
        self.axis = case.axis
        self.register_buffer("values", torch.randint(-127, 128, shape, dtype=torch.int8))
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", torch.zeros(channels, dtype=torch.int64))
        self.register_buffer("bias", torch.randn(channels))

    def forward(self) -> Tensor:
        found: Tensor = QD.dequantize_per_channel(
            self.values, self.scales, self.zeros, self.axis, -127, 127, torch.int8
        )
        return found


class CaseModule(nn.Module):
    """All cases in one graph, one output each.

    Attributes:
        scales: of the outputs.
    """

    def __init__(self, cases: Iterable[Case], setting: Setting, integers: Integers, inputs: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.cases, self.setting, self.integers = tuple(cases), setting, integers
        self.shift = (integers[0] + integers[1] + 1) // 2
        self.weights = nn.ModuleList(_Weight(case, setting.is_tie_prone) for case in self.cases)
        self.scales = [self._scale(value) for value in self._values(inputs)]

    def _scale(self, value: Tensor) -> float:
        # steps on either side: coarse where ties are wanted, else so many that a few elements saturate
        steps = 25 if self.setting.is_tie_prone else 100
        scale = max(float(value.abs().quantile(0.99)), 1e-3) / steps
        return 2.0 ** round(math.log2(scale)) if self.setting.is_tie_prone else scale

    def _quantized(self, x: Tensor, scale: float, zero_point: int) -> Tensor:
        args = (scale, zero_point + self.shift, *self.integers)
        found: Tensor = QD.dequantize_per_tensor(QD.quantize_per_tensor(x, *args), *args)
        return found

    def _values(self, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        x, y = self.setting.x, self.setting.y
        lowest = self.integers[0] - self.shift
        parameters = (x, y, (x[0], lowest), x, y)
        operands = [self._quantized(value, *found) for value, found in zip(inputs, parameters, strict=True)]
        weights: Any = self.weights
        cases = zip(self.cases, weights, strict=True)
        return [case.function(Operands(*[*operands, weight(), weight.bias])) for case, weight in cases]

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        """Returns the quantized result of every case."""
        values = zip(self.cases, self._values(inputs), self.scales, strict=True)
        zero_point = self.setting.zero_point
        return [value if case.is_float else self._quantized(value, scale, zero_point) for case, value, scale in values]


def graph(
    cases: Iterable[Case], setting: Setting, integers: Integers
) -> tuple[fx.GraphModule, list[float], tuple[Tensor, ...]]:
    """Returns the q/dq graph of all cases on such integers, the scales of its outputs, and inputs for it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        x, y = torch.randn(2, 8, 12, 12) * 2, torch.randn(2, 8, 12, 12)
        inputs = (x, y, x.abs() + 0.1, x.flatten(2), y[:, :, :1, :1].clone())
        module = CaseModule(cases, setting, integers, inputs).eval()
        return torch.export.export(module, inputs).module(), module.scales, inputs


def _float(cases: Iterable[Case]) -> tuple[Case, ...]:
    return tuple(replace(case, row=f"{case.row}, float output", is_float=True) for case in cases)


def _layers(suffix: str, function: Callable[[Tensor], Tensor]) -> tuple[Case, ...]:
    return (
        Case("convolution" + suffix, lambda o: function(F.conv2d(o.x, o.weight, o.bias, padding=1)), (16, 8, 3, 3)),
        Case("convolution" + suffix, lambda o: function(F.conv2d(o.x, o.weight, o.bias, 2, 1, 1, 8)), (8, 1, 3, 3)),
        Case("linear" + suffix, lambda o: function(F.linear(o.x, o.weight, o.bias)), (20, 12)),
    )


_PRODUCTS = (
    *_layers("", lambda y: y),
    *_layers("", F.relu),
    *_layers("", lambda y: F.hardtanh(y, -0.6, 1.7)),
    Case("convolution", lambda o: F.conv1d(o.line, o.weight, o.bias, dilation=2), (16, 8, 3)),
    Case("convolution", lambda o: F.conv2d(o.x, o.weight, None, groups=2), (16, 4, 3, 3)),
)

XNNPACK_RUN_TIME_CASES = (
    Case(
        "linear, scales of run time",
        lambda o: F.linear(quantize_dequantize(o.line, PerToken()), o.weight, o.bias),
        (5, 144),
        is_float=True,
    ),
    Case(
        "convolution, scales of run time",
        lambda o: F.conv2d(quantize_dequantize(o.x, PerAxis(0)), o.weight, o.bias),
        (6, 8, 3, 3),
        is_float=True,
    ),
)


XNNPACK_CASES = (
    *_PRODUCTS,
    Case("transposed convolution", lambda o: F.conv_transpose2d(o.x, o.weight, o.bias, 2), (8, 6, 3, 3), 1),
    Case("add", lambda o: o.x + o.y),
    Case("add", lambda o: F.relu(o.x + o.channel)),
    Case("sub", lambda o: o.x - o.y),
    Case("mul", lambda o: o.x * o.y),
    Case("mul", lambda o: F.hardtanh(o.x * o.y, -0.6, 1.7)),
    Case("maximum, minimum, div", lambda o: torch.maximum(o.x, o.y)),
    Case("maximum, minimum, div", lambda o: torch.minimum(o.x, o.y)),
    Case("maximum, minimum, div", lambda o: o.y / o.positive),
    Case("leaky_relu", lambda o: F.leaky_relu(o.x, 0.1)),
    Case("leaky_relu", lambda o: F.leaky_relu(o.x, 0.5)),
    Case("clamp", lambda o: F.relu(o.x)),
    Case("clamp", lambda o: F.relu6(o.x)),
    Case("clamp", lambda o: F.hardtanh(o.x, -0.6, 1.7)),
    Case("clamp", lambda o: o.x.clamp(min=-0.3)),
    Case("hardswish", lambda o: F.hardswish(o.x)),
    Case("gelu", lambda o: F.gelu(o.x)),
    Case("gelu", lambda o: F.gelu(o.x, approximate="tanh")),
    Case("sigmoid, tanh", lambda o: o.x.sigmoid()),
    Case("sigmoid, tanh", lambda o: o.x.tanh()),
    *(
        Case("elu, exp, log, sin, cos", f)
        for f in (lambda o: F.elu(o.x), lambda o: o.x.exp(), lambda o: o.positive.log())
    ),
    *(Case("elu, exp, log, sin, cos", f) for f in (lambda o: o.x.sin(), lambda o: o.x.cos())),
    *(
        Case("abs, neg, floor, ceil, square, sqrt", f)
        for f in (
            lambda o: o.x.abs(),
            lambda o: -o.x,
            lambda o: o.x.floor(),
            lambda o: o.x.ceil(),
            lambda o: o.x.square(),
        )
    ),
    Case("abs, neg, floor, ceil, square, sqrt", lambda o: o.positive.sqrt()),
    Case("rsqrt", lambda o: o.positive.rsqrt()),
    Case("mean", lambda o: o.x.mean((2, 3), keepdim=True)),
    Case("data movement, max_pool2d", lambda o: F.max_pool2d(o.x, 3, 2, 1)),
    Case("data movement, max_pool2d", lambda o: torch.cat([o.x, o.y], 1)),
    Case("data movement, max_pool2d", lambda o: F.pad(o.x, (1, 2, 0, 1))),
    Case("data movement, max_pool2d", lambda o: o.x.permute(0, 2, 3, 1)),
    Case("data movement, max_pool2d", lambda o: o.x[:, 1:4]),
    Case("data movement, max_pool2d", lambda o: o.x.flatten(1)),
    Case("quantize", lambda o: o.x),
)

_SUMS = tuple(
    Case(row, lambda o, f=f, g=g: g(f(o) + o.y), shape)  # type: ignore[misc]
    for g in (lambda y: y, F.relu)
    for row, f, shape in (
        ("convolution", lambda o: F.conv2d(o.x, o.weight, o.bias, padding=1), (8, 8, 3, 3)),
        ("linear", lambda o: F.linear(o.x, o.weight, o.bias), (12, 12)),
    )
)

# torch's own operators on integers, which the emulation runs too
_INTEGERS = (
    Case(INTEGER_OPERATORS, lambda o: o.x.mean((2, 3))),
    Case(INTEGER_OPERATORS, lambda o: o.x.mean(1, keepdim=True)),
    Case(INTEGER_OPERATORS, lambda o: F.adaptive_avg_pool2d(o.x, 1)),
    Case(INTEGER_OPERATORS, lambda o: F.relu(o.x)),
    Case(INTEGER_OPERATORS, lambda o: F.hardtanh(o.x, -0.6, 1.7)),
    Case(INTEGER_OPERATORS, lambda o: F.embedding(torch.arange(9) % 5, o.weight), (5, 12)),
    Case(INTEGER_OPERATORS, lambda o: F.max_pool2d(o.x, 3, 2, 1)),
    Case(INTEGER_OPERATORS, lambda o: torch.cat(o.x.chunk(2, 1)[::-1], 1)),
    Case(INTEGER_OPERATORS, lambda o: F.pad(o.x.permute(0, 2, 3, 1)[:, 1:4], (1, 2, 0, 1))),
)

# Averages over windows are convolutions with weights of 1.
_WINDOWS = (
    Case("convolution", lambda o: F.avg_pool2d(o.x, 3, 2, 1)),
    Case("convolution", lambda o: F.avg_pool2d(o.x, 2, divisor_override=3)),
    Case("convolution", lambda o: F.adaptive_avg_pool2d(o.x, (3, 4))),
    Case("convolution", lambda o: F.conv3d(o.x.reshape(2, 2, 4, 12, 12), o.weight, o.bias), (6, 2, 3, 3, 3)),
)

_FUNCTIONS = " then silu, gelu or tanh"
_APPROXIMATED = (
    *_layers(_FUNCTIONS, F.silu),
    *_layers(_FUNCTIONS, F.gelu)[2:],
    *_layers(_FUNCTIONS, lambda y: F.gelu(y, approximate="tanh"))[2:],
    *_layers(_FUNCTIONS, torch.tanh)[2:],
)

X86_CASES = (
    *_PRODUCTS,
    *_WINDOWS,
    *_INTEGERS,
    *_layers("", F.relu6),
    *_layers("", lambda y: F.hardswish(y))[:2],
    *_layers("", lambda y: F.leaky_relu(y, 0.1))[2:],
    *_SUMS,
    *_float(_layers("", lambda y: y)),
    *_float(_SUMS),
    *_APPROXIMATED,
    *_float(_APPROXIMATED),
)
