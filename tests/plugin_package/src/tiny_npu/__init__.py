"""A whole backend in less than 60 lines: sums with relu, int8, one rounding."""

from functools import partial

import torch
from torch import Tensor, fx

from quantplug import Backend
from quantplug.annotators.elementwise import binary
from quantplug.core.graph.editing import call
from quantplug.core.patterns.language import Match, either, op, single_use, value
from quantplug.core.patterns.rules import Rule
from quantplug.core.qdq.qparams import dequantize, qparams, quantize
from quantplug.core.specs.dtypes import DTypeConfig, DTypeWithConstraints
from quantplug.lowering.rules import lower_by_rules


@torch.library.custom_op("tiny_npu::add", mutates_args=())
def add(one: Tensor, other: Tensor, ratios: list[float], zero_points: list[int], low: int) -> Tensor:
    """Adds in float32 and rounds once; the last zero point and `low` are those of the output."""
    real = (one.float() - zero_points[0]) * ratios[0] + (other.float() - zero_points[1]) * ratios[1]
    return torch.clamp(real.round() + zero_points[2], low, 127).to(torch.int8)


@add.register_fake
def _(one: Tensor, other: Tensor, ratios: list[float], zero_points: list[int], low: int) -> Tensor:
    return torch.empty_like(one + other)


def to_kernel(match: Match) -> fx.Node:
    """Returns the kernel for dequantize, add, relu and quantize."""
    one, other, out = (qparams(node) for node in (match["one"], match["other"], match.root))
    low = out.zero_point if "relu" in match else out.quant_min
    ratios = [params.scale / out.scale for params in (one, other)]
    zero_points = [params.zero_point for params in (one, other, out)]
    args = (match["a"], match["b"], ratios, zero_points, low)
    return call(match.root, torch.ops.tiny_npu.add.default, args, match["op"], torch.int8)


SUM = op(
    "add",
    self=dequantize(input=value("a"), name="one"),
    other=dequantize(input=value("b"), name="other"),
    name="op",
)
INT8 = DTypeWithConstraints(torch.int8, scale_min_lower_bound=2**-12)
TINY_NPU = Backend(
    name="tiny_npu",
    summary="sums",
    annotators=(binary("add", activations=("relu",)),),
    dtypes=(DTypeConfig("int8", input=INT8, output=INT8),),
    lowering=partial(
        lower_by_rules,
        rules=(Rule(quantize(input=either(op("relu", self=single_use(SUM), name="relu"), SUM)), to_kernel),),
        library="tiny_npu",
    ),
)
