"""Ranges that are measured at run time, for compilers.

Before: `choose_qparams` nodes, which measure a tensor's range and give a scale and a zero point. After: the ATen
operators that they stand for. torch 2.13's inductor has a decomposition of the affine one that leaves 0 out of the
range, so that the zero point of a tensor of positive numbers is wrong; of the symmetric one it has none, and a package
cannot call what is written in Python.
"""

from typing import Any

import torch
from torch import fx

from quantplug.core.graph.editing import replace
from quantplug.core.graph.facts import operands

aten, QD = torch.ops.aten, torch.ops.quantized_decomposed
UNSIGNED_MIDDLE = 128  # the zero point of symmetric uint8


def spell_out_ranges(graph: fx.Graph) -> None:
    """Replaces the operators that measure ranges by the ATen operators that they stand for."""
    for node in [node for node in graph.nodes if node.target in (QD.choose_qparams.tensor, SYMMETRIC)]:
        _spell_out(node)


def _spell_out(node: fx.Node) -> None:
    given = operands(node)
    with node.graph.inserting_before(node):
        choose = _symmetric if node.target is SYMMETRIC else _affine
        chosen = choose(node.graph, given)
        results = _vector(node.graph, chosen[0], torch.float64), _vector(node.graph, chosen[1], torch.int64)
    for item in list(node.users):  # operator.getitem
        replace(item, results[0 if item.args[1] == 0 else 1])


def _range(graph: fx.Graph, x: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Returns the least and the greatest number, or 0 where it lies outside."""
    low, high = graph.call_function(aten.amin.default, (x, [])), graph.call_function(aten.amax.default, (x, []))
    low = graph.call_function(aten.clamp_max.default, (low, 0.0))
    return low, graph.call_function(aten.clamp_min.default, (high, 0.0))


def _affine(graph: fx.Graph, given: dict[str, Any]) -> tuple[fx.Node, fx.Node]:
    low, high = _range(graph, given["input"])
    width = graph.call_function(aten.sub.Tensor, (high, low))
    scale = _step(graph, width, given["quant_max"] - given["quant_min"], given["eps"])
    steps = graph.call_function(aten.round.default, (graph.call_function(aten.div.Tensor, (low, scale)),))
    zero_point = graph.call_function(aten.rsub.Scalar, (steps, given["quant_min"]))
    return scale, graph.call_function(aten.clamp.default, (zero_point, given["quant_min"], given["quant_max"]))


def _symmetric(graph: fx.Graph, given: dict[str, Any]) -> tuple[fx.Node, fx.Node]:
    low, high = _range(graph, given["input"])
    reach = graph.call_function(aten.maximum.default, (graph.call_function(aten.neg.default, (low,)), high))
    scale = _step(graph, reach, (given["quant_max"] - given["quant_min"]) / 2, given["eps"])
    middle = UNSIGNED_MIDDLE if given["dtype"] == torch.uint8 else 0
    return scale, graph.call_function(aten.full_like.default, (scale, middle))


def _step(graph: fx.Graph, width: fx.Node, steps: float, least: float) -> fx.Node:
    scale = graph.call_function(aten.div.Tensor, (width, float(steps)))
    return graph.call_function(aten.clamp_min.default, (scale, least))


def _vector(graph: fx.Graph, number: fx.Node, dtype: torch.dtype) -> fx.Node:
    one = graph.call_function(aten.reshape.default, (number, [1]))
    return graph.call_function(aten.to.dtype, (one, dtype))


SYMMETRIC = QD.choose_qparams_symmetric.tensor
