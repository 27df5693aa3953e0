"""Clamps on integers.

Before: `relu|hardtanh|clamp -> quantize`. After: the quantization, then a clamp of its integers, or none where
the integers end at the bounds anyway, as behind a relu. Quantization is monotone, so both orders give the
same integers.
"""

from collections.abc import Collection

import torch
from torch import Tensor, fx

from quantplug.core.graph.editing import call
from quantplug.core.graph.operators import CLAMPS
from quantplug.core.graph.traits import Bounds, clamp_bounds
from quantplug.core.patterns.language import Match, Pattern, op, single_use
from quantplug.core.patterns.rules import Rule
from quantplug.core.qdq.qparams import QParams, is_static, qparams, quantize

aten = torch.ops.aten


_BYTES = (torch.uint8, torch.int8)


def clamp_rules(source: Pattern, dtypes: Collection[torch.dtype] = _BYTES) -> tuple[Rule, ...]:
    """Returns the rules that quantize before a clamp.

    Args:
        source: what the clamp reads.
        dtypes: the integers that the target clamps.
    """
    return tuple(_rule(name, source, dtypes) for name in CLAMPS)


def _rule(name: str, source: Pattern, dtypes: Collection[torch.dtype]) -> Rule:
    def rewrite(match: Match) -> fx.Node | str:
        clamp, params = match["clamp"], qparams(match.root)
        bounds = clamp_bounds(clamp)
        if params.dtype not in dtypes or bounds is None:
            return "its bounds are tensors, or the target clamps no such integers"
        return _clamp_integers(match, params, bounds)

    pattern = quantize(input=single_use(op(name, self=source, name="clamp")))
    return Rule(pattern.where(lambda match: is_static(match.root)), rewrite)


def _clamp_integers(match: Match, params: QParams, bounds: Bounds) -> fx.Node:
    node, clamp = match.root, match["clamp"]
    source = clamp.args[0]
    low, high = (_integer(bound, params) for bound in bounds)
    low, high = params.quant_min if low is None else low, params.quant_max if high is None else high
    integers = call(clamp, node.target, (source, *params.args()), source, params.dtype)
    if (low, high) != (params.quant_min, params.quant_max):
        integers = call(clamp, aten.clamp.default, (integers, low, high), node)
    return integers


def _integer(bound: float | None, params: QParams) -> int | None:
    """Returns what a bound is quantized to, by the operator that quantizes the rest."""
    if bound is None:
        return None
    quantized: Tensor = torch.ops.quantized_decomposed.quantize_per_tensor(torch.tensor(float(bound)), *params.args())
    return int(quantized)
