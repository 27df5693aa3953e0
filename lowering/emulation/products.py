"""Convolutions and linears on integers, with any accumulator.

Before: `dequantize -> conv|linear(integer weight, bias) [-> clamp] -> quantize`. After: one `Product`. Sums
whose order does not matter run as one float64 operator; where every addition rounds or saturates, the
products are added one by one in the order of the weight's memory (channel, row, column), from the bias on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quantplug.core.graph.traits import per_dimension
from quantplug.core.qdq.qparams import QD, IntegerWeight, QParams
from quantplug.lowering.emulation.kernels import Kernel, zero
from quantplug.lowering.emulation.numerics import Numerics

Run = Callable[[Tensor, Tensor], Tensor]
Columns = Callable[[Tensor], Tensor]
_INT32 = (-(2**31), 2**31 - 1, torch.int32)


@dataclass(frozen=True)
class Layer:
    """A convolution or linear as the arithmetic needs it.

    Attributes:
        run: the operator without bias, from (x, weight in the operator's own layout) to sums.
        weight: int8, output channels first, with one scale for each.
        transposed: whether the operator wants the output channels second.
        bias: int32 in units of input scale x weight scale, or None.
        channel: the output's axis of channels.
        columns: from x to [batch, groups, products of one sum, positions], or the reason why there is no such form.
        groups: of a convolution.
    """

    run: Run
    weight: IntegerWeight
    transposed: bool
    bias: Tensor | None
    channel: int
    columns: Columns | str
    groups: int = 1


class Product(Kernel):
    """A convolution or linear on integers."""

    weight: Tensor
    bias: Tensor
    ratio: Tensor

    def __init__(self, layer: Layer, entered: QParams, out: QParams, numerics: Numerics) -> None:
        super().__init__(out)
        self.layer, self.numerics, self.zero_point = layer, numerics, zero(entered)
        weight = layer.weight.values
        self.register_buffer("weight", weight.movedim(0, 1).contiguous() if layer.transposed else weight)
        self.register_buffer("bias", torch.zeros(len(weight), dtype=torch.int32) if layer.bias is None else layer.bias)
        self.register_buffer("ratio", numerics.ratio(entered.scale, layer.weight.scales, out=out.scale))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the layer's output integers."""
        # padding with zeros is padding with the zero point, which has just been subtracted
        centred = x.to(torch.float64) - self.zero_point
        sums = self._at_once(centred) if self.numerics.is_order_free else self._one_by_one(centred)
        scaled = self.numerics.requantize(sums, self._along_channels(self.ratio, sums))
        return self.finish(scaled + zero(self.out))

    def _at_once(self, centred: Tensor) -> Tensor:
        # float64 holds every integer below 2^53: exact in every order, like an integer accumulator
        sums = self.layer.run(centred, self.weight.to(torch.float64))
        return self.numerics.wrap(sums + self._along_channels(self.bias, sums))

    def _one_by_one(self, centred: Tensor) -> Tensor:
        columns: Any = self.layer.columns
        dtype = self.numerics.working_dtype
        products = columns(centred).to(dtype)
        groups = self.layer.groups
        weight = self.layer.weight.values.to(dtype).reshape(groups, len(self.bias) // groups, -1)
        start = self.bias.to(dtype).reshape(1, groups, -1, 1)
        total = self.numerics.add(torch.zeros((), dtype=dtype), start)
        for k in range(weight.shape[-1]):
            total = self.numerics.add(total, products[:, :, k].unsqueeze(2) * weight[..., k].unsqueeze(-1))
        return self._shaped(total, centred)

    def _shaped(self, total: Tensor, x: Tensor) -> Tensor:
        shape = self.layer.run(x.to("meta"), self.weight.to("meta", torch.float64)).shape
        batch, groups, channels, positions = total.shape
        flat = total.reshape(batch, groups * channels, positions)
        return (flat.movedim(1, -1) if self.layer.channel == -1 else flat).reshape(shape)

    def _along_channels(self, found: Tensor, like: Tensor) -> Tensor:
        if self.layer.channel == -1:
            return found
        return found.reshape(-1, *(1,) * (like.dim() - 2))


def integer_bias(bias: Tensor, entered: QParams, weight: IntegerWeight) -> Tensor:
    """Returns a float bias in the unit of the sums, as ExecuTorch's serializer and torchao's derived specs round it."""
    scales = weight.scales * float(entered.scale)  # type: ignore[arg-type]
    zeros = torch.zeros_like(scales, dtype=torch.int64)
    found: Tensor = QD.quantize_per_channel(bias.detach().to(torch.float32), scales, zeros, 0, *_INT32)
    return found


def linear_columns(x: Tensor) -> Tensor:
    """Returns the rows of a linear's input as [rows, 1, features, 1]."""
    return x.reshape(-1, 1, x.shape[-1], 1)


def convolution_columns(given: dict[str, Any], kernel: tuple[int, ...]) -> Columns | str:
    """Returns the function that lays the patches of a convolution's input out, or why there is none.

    Args:
        given: the operands by name.
        kernel: spatial sizes of the weight, one or two.
    """
    if isinstance(given["padding"], str):
        return f"padding '{given['padding']}' is not emulated with an accumulator of this kind"
    spatial = len(kernel)
    geometry = [
        (least,) * (2 - spatial) + tuple(per_dimension(given[name], spatial))
        for name, least in (("dilation", 1), ("padding", 0), ("stride", 1))
    ]
    size = (1,) * (2 - spatial) + kernel

    def columns(x: Tensor) -> Tensor:
        image = x.unsqueeze(2) if spatial == 1 else x
        patches = F.unfold(image, size, *geometry)
        return patches.reshape(len(x), given["groups"], -1, patches.shape[-1])

    return columns
