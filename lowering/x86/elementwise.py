"""Sums and products of two integer tensors.

Before: `add|mul(dequantize, dequantize) -> relu -> quantize`. After: `onednn.qadd`, `qadd_relu` or `qmul`.
"""

from collections.abc import Callable

import torch

from quantplug.core.graph import operands, tensor_value
from quantplug.core.pattern import Match, Op, op, single_use, value
from quantplug.lowering.x86.qparams import dequantize, qparams, quantize
from quantplug.lowering.x86.rewriting import Rule, absorb, call, replace

onednn = torch.ops.onednn


def _lower(target: torch._ops.OpOverload) -> Callable[[Match], str | None]:
    def lower(match: Match) -> str | None:
        one, other, result = (qparams(node) for node in (match["one"], match["other"], match.root))
        shapes = [tensor_value(match[name]) for name in ("one_integers", "other_integers")]
        if any(not p.is_static or not p.is_full_range or p.dtype != torch.uint8 for p in (one, other, result)):
            return "the integer kernel takes static torch.uint8 with the range 0..255"
        if any(shape is None for shape in shapes) or shapes[0].shape != shapes[1].shape:  # type: ignore[union-attr]
            return "its inputs have different shapes"
        args = (
            *(match["one_integers"], one.scale, one.zero_point),
            *(match["other_integers"], other.scale, other.zero_point),
            *(result.scale, result.zero_point, result.dtype),
        )
        kernel = call(match.root, target, args, match.root)
        absorb(kernel, *match.nodes)
        replace(match.root, kernel)
        return None

    return lower


def _of_two(name: str) -> Op:
    return op(
        name,
        self=dequantize(input=value("one_integers"), name="one"),
        other=dequantize(input=value("other_integers"), name="other"),
        where=(_unscaled,),
    )


def _unscaled(match: Match) -> str | None:
    alpha = operands(match.nodes[0]).get("alpha", 1)
    return None if alpha == 1 else f"the sum multiplies its second input by {alpha}"


ELEMENTWISE = (
    Rule(
        quantize(input=single_use(op("relu", self=single_use(_of_two("add.Tensor"))))), _lower(onednn.qadd_relu.tensor)
    ),
    Rule(quantize(input=single_use(_of_two("add.Tensor"))), _lower(onednn.qadd.tensor)),
    Rule(quantize(input=single_use(_of_two("mul.Tensor"))), _lower(onednn.qmul.tensor)),
)
