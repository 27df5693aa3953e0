"""Scales of run time as a q/dq graph says them: a tensor, what is chosen from it, and what quantizes it."""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torchao.quantization.pt2e import PerAxis, PerToken

from quantplug.core.graph.facts import operands, operator_name
from quantplug.core.observers.rowwise import Granularity
from quantplug.core.qdq.nodes import is_dynamic, is_quantize, range_of


@dataclass(frozen=True)
class Chain:
    """A tensor that is quantized and dequantized with parameters that are chosen from it at run time."""

    source: fx.Node
    choose: fx.Node
    quantize: fx.Node
    dequantize: fx.Node

    @property
    def granularity(self) -> Granularity | None:
        """For what there is a scale each; None for the whole tensor, or for what no kernel here knows."""
        found: dict[str, Granularity] = {"per row": PerToken(), "per sample": PerAxis(0)}
        return found.get(range_of(self.dequantize))

    @property
    def takes_all(self) -> bool:
        """Whether all of int8 stands for the numbers from the lowest to the highest, which kernels choose by row."""
        given = operands(self.choose)
        ends = tuple(given.get(name) for name in ("target_dtype", "quant_min", "quant_max"))
        is_affine = operator_name(self.choose) == "torchao::choose_qparams_affine"
        known = ((torch.int8, None, None), (torch.int8, -128, 127))
        return not is_affine or (given["mapping_type"] == "ASYMMETRIC" and ends in known)


def chain_of(dequantize: Any) -> Chain | None:
    """Returns the chain that ends in a dequantize node, None for any other node."""
    quantize: Any = dequantize.args[0] if is_dynamic(dequantize) else None
    if not is_quantize(quantize):
        return None
    given = operands(quantize)
    scale, source = given.get("scale", given.get("scales")), given["input"]
    if not isinstance(scale, fx.Node) or not isinstance(source, fx.Node):
        return None
    choose: Any = scale.args[0] if scale.target is operator.getitem else None
    if not isinstance(choose, fx.Node) or "choose_qparams" not in operator_name(choose) or choose.args[0] is not source:
        return None
    return Chain(source, choose, quantize, dequantize)
