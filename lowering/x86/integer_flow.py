"""Quantize and dequantize nodes moved through operators that only move or select values.

Before: `dequantize -> view -> quantize` and the like. After: the operator works on integers and the
pair is gone. Each rule is an equality: dequantization is one monotone function applied to every element,
so it commutes exactly with every operator that moves, repeats, selects or compares elements.
"""

from typing import Any

import torch
from torch import fx

from quantplug.core.graph.editing import call, viewed
from quantplug.core.graph.facts import operands, rank, tensor_value
from quantplug.core.graph.operators import JOINS, MOVES, REPEATS
from quantplug.core.patterns.language import Match, each, op, single_use, value
from quantplug.core.patterns.rules import Rule, apply
from quantplug.core.qdq.qparams import QD, QParams, dequantize, is_static, qparams, quantize
from quantplug.core.specs.decision import decision
from quantplug.lowering.clamps import clamp_rules

aten = torch.ops.aten

# torch 2.13 stores and compares unsigned integers of more bits, and computes nothing else with them.
_STORED = (torch.uint16, torch.uint32, torch.uint64)


def _may_flow(match: Match) -> str | None:
    dequantize_node = match["dequantize"]
    is_stored = qparams(dequantize_node).dtype in _STORED
    return "torch does not compute with its integers" if is_stored else is_static(dequantize_node)


STATIC_DEQUANTIZE = dequantize(input=value("integers"), name="dequantize").where(_may_flow)


def move(graph: fx.Graph) -> None:
    """Moves quantize nodes up and dequantize nodes down as far as integers may flow, and drops what meets."""
    apply(graph, HOIST, backwards=True)
    apply(graph, SINK)
    apply(graph, CANCEL)


def _hoist(match: Match) -> fx.Node | str:
    quantize_node, mover = match.root, match["mover"]
    if tensor_value(match["source"]) is None:
        return "its source has no known value"
    decided = decision(mover)
    if decided is not None and not decided.quantized:
        return decided.why
    below = call(mover, quantize_node.target, (match["source"], *quantize_node.args[1:]), match["source"], torch.uint8)
    moved = call(mover, mover.target, (below, *mover.args[1:]), quantize_node)
    moved.kwargs = mover.kwargs
    return moved


HOIST = (
    Rule(
        quantize(input=single_use(op(*MOVES, *REPEATS, name="mover", self=value("source"))), dtype=torch.uint8).where(
            lambda m: is_static(m.root)
        ),
        _hoist,
    ),
)


def _sink(match: Match) -> fx.Node:
    mover = match.root
    integers = call(
        mover, mover.target, (match["integers"], *mover.args[1:]), mover, qparams(match["dequantize"]).dtype
    )
    integers.kwargs = mover.kwargs
    return _dequantized(mover, integers, qparams(match["dequantize"]))


def _dequantized(old: fx.Node, integers: fx.Node, params: QParams) -> fx.Node:
    return call(old, QD.dequantize_per_tensor.default, (integers, *params.args()), old)


def _sink_join(match: Match) -> fx.Node | str:
    """Cat and stack of tensors that share one set of parameters."""
    sources = match["sources"]
    params = {qparams(source) for source in sources}
    if len(params) > 1 or not all(p.is_static for p in params):
        return "its inputs are quantized with different parameters"
    (shared,) = params
    integers = [source.args[0] for source in sources]
    joined = call(match.root, match.root.target, (integers, *match.root.args[1:]), match.root, shared.dtype)
    joined.kwargs = match.root.kwargs
    return _dequantized(match.root, joined, shared)


def _sink_relu(match: Match) -> fx.Node:
    """max(x, 0) is max(integer, zero point), and nothing where no integer stands for a negative number."""
    params = qparams(match["dequantize"])
    integers: Any = match["integers"]
    if params.zero_point != params.quant_min:
        clamp = aten.clamp_min.default
        integers = call(match.root, clamp, (integers, params.zero_point), match.root, params.dtype)
    return _dequantized(match.root, integers, params)


def _sink_pad(match: Match) -> fx.Node | str:
    params, given = qparams(match["dequantize"]).static(), operands(match.root)
    number: Any = given.get("value") or 0.0
    integer = round(float(number) / params.scale) + params.zero_point
    exact = (integer - params.zero_point) * params.scale
    if not params.quant_min <= integer <= params.quant_max or abs(exact - float(number)) > 1e-6 * params.scale:
        return f"the padding value {number} is no integer of its quantization"
    pad = aten.constant_pad_nd.default
    padded = call(match.root, pad, (match["integers"], given["pad"], integer), match.root, params.dtype)
    return _dequantized(match.root, padded, params)


def _sink_max_pool(match: Match) -> fx.Node | str:
    """The integer maximum is the maximum; the padding is the lowest integer in both."""
    given = operands(match.root)
    target = torch.ops.quantized.max_pool2d.default
    if qparams(match["dequantize"]).dtype != torch.uint8:
        return "the integer max-pool takes torch.uint8"
    window = [given[name] for name in ("kernel_size", "stride", "padding", "dilation", "ceil_mode")]
    is_single = rank(match["integers"]) == 3
    images = viewed(match.root, aten.unsqueeze.default, match["integers"], 0) if is_single else match["integers"]
    pooled = call(match.root, target, (images, *window), match.root, torch.uint8)
    if is_single:
        pooled.meta["val"] = pooled.meta["val"].unsqueeze(0)
        pooled = viewed(match.root, aten.squeeze.dim, pooled, 0)
    return _dequantized(match.root, pooled, qparams(match["dequantize"]))


SINK = (
    *(Rule(op(name, self=STATIC_DEQUANTIZE), _sink) for name in MOVES),
    Rule(op(*JOINS, tensors=each(dequantize(), "sources")), _sink_join),
    Rule(op("relu", self=single_use(STATIC_DEQUANTIZE)), _sink_relu),
    *clamp_rules(STATIC_DEQUANTIZE),
    Rule(op("constant_pad_nd", self=STATIC_DEQUANTIZE), _sink_pad),
    Rule(op("pad", self=STATIC_DEQUANTIZE, mode="constant"), _sink_pad),
    Rule(op("max_pool2d", self=STATIC_DEQUANTIZE), _sink_max_pool),
)


def _cancel(match: Match) -> fx.Node | str:
    if qparams(match.root) != qparams(match["dequantize"]):
        return "its integers are rescaled"
    integers: fx.Node = match["integers"]
    return integers


CANCEL = (Rule(quantize(input=STATIC_DEQUANTIZE), _cancel),)
