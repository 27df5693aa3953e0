"""Clamps and narrow ranges as the activations that XNNPACK fuses.

Before: clamps behind kernels, and integers of fewer than 256 values. After: hardtanh, and the whole of int8.
"""

from dataclasses import replace

import torch
from torch import fx

from quantplug.core.graph.editing import call_like
from quantplug.core.graph.facts import operator_name, rank
from quantplug.core.graph.traits import clamp_bounds
from quantplug.core.qdq.nodes import is_dequantize, is_quantize
from quantplug.core.qdq.qparams import INT8, StaticQParams, quantized_output, requantize, static_qparams
from quantplug.lowering.xnnpack.legalize.legalized import Legalized
from quantplug.lowering.xnnpack.legalize.operators import ACTIVATIONS, FUSING, calls, first_input

_ATEN = torch.ops.aten


def clamps_as_fusable_activations(working: fx.GraphModule) -> None:
    """XNNPACK fuses relu and hardtanh into the kernel before them, but the serializer drops a clamp."""
    for node in list(working.graph.nodes):
        given, output, producer = clamp_bounds(node), quantized_output(node), first_input(node)
        if given is None or output is None or operator_name(node) in ACTIVATIONS:
            continue
        if operator_name(producer) not in FUSING or len(producer.users) != 1:
            continue
        low, high = given
        bounds = (_lowest(output) if low is None else low, _highest(output) if high is None else high)
        if bounds[0] <= bounds[1]:
            node.target, node.args, node.kwargs = _ATEN.hardtanh.default, (producer, *map(float, bounds)), {}


def find_slopes_of_other_ranks(working: fx.GraphModule, found: Legalized) -> None:
    """Finds prelus that are no images: ExecuTorch hands them to XNNPACK, and turns every input's channels last."""
    for node in calls(working, ("aten::prelu",)):
        dimensions = rank(first_input(node))
        if dimensions != 4:
            found.portable[node.name] = f"XNNPACK's prelu takes images of four dimensions, not {dimensions}"


def _lowest(params: StaticQParams) -> float:
    return (params.quant_min - params.zero_point) * params.scale


def _highest(params: StaticQParams) -> float:
    return (params.quant_max - params.zero_point) * params.scale


def narrow_ranges_as_clamps(working: fx.GraphModule) -> None:
    """XNNPACK's kernels saturate to the whole of int8; a narrower range becomes a clamp and the whole range."""
    for node in [n for n in working.graph.nodes if is_quantize(n)]:
        params = static_qparams(node)
        if params is not None and params.dtype == torch.int8 and not params.is_int8:
            _bound(working, node, params)
    for node in [n for n in working.graph.nodes if is_dequantize(n)]:
        params = static_qparams(node)
        if params is not None and params.dtype == torch.int8 and first_input(node).op != "get_attr":
            node.args = (node.args[0], params.scale, params.zero_point, *INT8)  # reading needs no range


def _bound(working: fx.GraphModule, quantize: fx.Node, params: StaticQParams) -> None:
    value, low, high = first_input(quantize), _lowest(params), _highest(params)
    quantize.args = (value, params.scale, params.zero_point, *INT8)
    bounds = clamp_bounds(value) if operator_name(value) in ACTIVATIONS and len(value.users) == 1 else None
    if bounds is not None:
        least, most = (end if own is None else float(own) for own, end in zip(bounds, (low, high), strict=True))
        value.target, value.kwargs = _ATEN.hardtanh.default, {}
        value.args = (value.args[0], max(low, least), min(high, most))
        return
    with working.graph.inserting_before(quantize):
        # Behind a kernel that takes no bounds the clamp works on the integers; rounding commutes with it.
        fused = operator_name(value) in FUSING and len(value.users) == 1
        source = value if fused else requantize(working.graph, value, replace(params, quant_min=-128, quant_max=127))
        quantize.replace_input_with(value, call_like(working.graph, value, _ATEN.hardtanh.default, source, low, high))
