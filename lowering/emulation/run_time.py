"""XNNPACK's products whose input is quantized when they run: one scale and zero point a row, or a sample.

Before: choose_qparams, quantize and dequantize nodes in front of a linear or convolution with integer weights, which
ends in float. After: one module from float to float with the kernel's own arithmetic, all in float32: the forward scale
255 / (max - min) with 0 in the range, the zero point from that end of the range that it puts less out of place, the sum
of integers times 1 / scale, then a fused multiply-add with the weight's scale and the bias (`src/reference/packing.cc`,
`src/qs8-gemm`, `xnn_f32_qd8_asymmetric_quantization_params`). Weights in groups keep their scales in bfloat16.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from quantplug.core.graph.facts import constant_value, operands
from quantplug.core.patterns.language import Match, op, value
from quantplug.core.patterns.rules import Rule
from quantplug.core.qdq.nodes import AFFINE_OPS
from quantplug.core.qdq.qparams import integer_weight
from quantplug.lowering.emulation.rows import substitute
from quantplug.lowering.run_time import Chain, chain_of

_LOW, _HIGH = -128.0, 127.0


@dataclass(frozen=True)
class _Weight:
    """Integers, output channels first, and float32 scales of shape (channels,) or (channels, groups)."""

    values: Tensor
    scales: Tensor


class RunTimeProduct(nn.Module):
    """A linear or convolution of a float tensor that it quantizes itself.

    Args:
        run: the operator without bias.
        weight: its integers and scales.
        bias: float32, or None.
        samples: whether there is a scale for each sample, not for each row; channels are then on axis 1.
    """

    weight: Tensor
    scales: Tensor
    bias: Tensor

    def __init__(
        self, run: Callable[[Tensor, Tensor], Tensor], weight: _Weight, bias: Tensor | None, samples: bool
    ) -> None:
        super().__init__()
        self.product, self.samples = run, samples
        self.register_buffer("weight", weight.values)
        self.register_buffer("scales", weight.scales)
        self.register_buffer("bias", torch.zeros(len(weight.values)) if bias is None else bias.detach().float())

    def forward(self, x: Tensor) -> Tensor:
        """Returns the layer's float32 result."""
        centred, inverse = self._quantized(x)
        if self.scales.dim() == 2:
            total = self._in_groups(centred) * inverse
            return total + self.bias
        sums = self.product(centred.to(torch.float64), self.weight.to(torch.float64)).to(torch.float32)
        along = (-1, *(1,) * (x.dim() - 2)) if self.samples else (-1,)
        scales, bias = (found.reshape(along).to(torch.float64) for found in (self.scales, self.bias))
        # float64 holds the product of two float32 exactly, so that the sum is rounded once, as in the kernel
        return ((sums * inverse).to(torch.float64) * scales + bias).to(torch.float32)

    def _quantized(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns integers less their zero point, and the scale that takes them back."""
        dims = list(range(1, x.dim())) if self.samples else [-1]
        low, high = x.amin(dims, keepdim=True).clamp(max=0), x.amax(dims, keepdim=True).clamp(min=0)
        scale = torch.where(low == high, torch.ones_like(low), (_HIGH - _LOW) / (high - low))
        least, greatest = low * scale, high * scale
        from_least = (_LOW + least) + (_HIGH + greatest) > 0
        zero = torch.where(from_least, _LOW - least, _HIGH - greatest).clamp(_LOW, _HIGH).round()
        steps = (x * scale).round()
        return torch.minimum(torch.maximum(steps, _LOW - zero), _HIGH - zero), 1.0 / scale

    def _in_groups(self, centred: Tensor) -> Tensor:
        groups = self.scales.shape[1]
        x, weight = (found.to(torch.float64).reshape(*found.shape[:-1], groups, -1) for found in (centred, self.weight))
        sums = torch.einsum("...gk,ogk->...og", x, weight)
        return (sums * self.scales.to(torch.float64)).sum(-1).to(torch.float32)


def run_time_products(*operators: str) -> tuple[Rule, ...]:
    """Returns the rules of linears and 2-D convolutions whose input gets its scales when they run.

    Args:
        operators: ATen names with operands input, weight and bias.
    """

    def rewrite(match: Match) -> fx.Node | str:
        node, given = match.root, operands(match.root)
        chain, weight, bias = chain_of(given["input"]), _weight(given["weight"]), given.get("bias")
        held = None if bias is None else constant_value(bias)
        reason = weight if isinstance(weight, str) else _objection(chain, bias, held)
        if reason is not None:
            return reason
        assert chain is not None
        assert not isinstance(weight, str)
        samples = "conv" in str(node.target)
        return substitute(match, RunTimeProduct(_runner(node), weight, held, samples), [chain.source])

    return (Rule(op(*operators, input=value("x"), weight=value("weight")), rewrite),)


def _objection(chain: Chain | None, bias: Any, held: Tensor | None) -> str | None:
    if chain is None or chain.granularity is None:
        return "its input has no scale for each row or sample that is chosen when it runs"
    return "its bias is not a constant" if bias is not None and held is None else None


def _weight(node: fx.Node) -> _Weight | str:
    if node.target not in AFFINE_OPS:
        found = integer_weight(node)
        return found if isinstance(found, str) else _Weight(found.values, found.scales)
    held, _, scale, zero_point = node.args[:4]
    values, scales, zeros = (constant_value(n) if isinstance(n, fx.Node) else None for n in (held, scale, zero_point))
    if values is None or scales is None or values.dim() != 2:
        return "its weight is not a constant matrix"
    if zeros is not None and bool(zeros.any()):
        return "its weight has a zero point other than 0"
    in_groups = scales.detach().float().reshape(len(values), -1)
    return _Weight(values.detach(), in_groups.to(torch.bfloat16).float())


def _runner(node: fx.Node) -> Callable[[Tensor, Tensor], Tensor]:
    target: Any = node.target
    given = operands(node)

    def run(x: Tensor, weight: Tensor) -> Tensor:
        found: Tensor = target(**{**given, "input": x, "weight": weight, "bias": None})
        return found

    return run
