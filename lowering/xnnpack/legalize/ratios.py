"""Ratios of scales that XNNPACK's kernels express; operators outside are found, with the reason."""

from torch import fx

from quantplug.core.graph.facts import operator_name
from quantplug.core.graph.traits import clamp_bounds
from quantplug.core.qdq.nodes import is_dequantize, is_quantize
from quantplug.core.qdq.qparams import quantized_output, static_qparams
from quantplug.lowering.xnnpack.legalize.legalized import Legalized
from quantplug.lowering.xnnpack.legalize.operators import after_activation

# Ratios of scales outside of which XNNPACK refuses to create the operator (its operator sources, "scale
# ratio must be in"): smallest and first too large.
RATIOS = {
    "add": (2.0**-10, 2.0**8),
    "mul": (2.0**-16, 2.0**8),
    "convert": (2.0**-8, 2.0**7),
    "gemm": (0.0, 2.0**8),
}


def find_scale_ratios_out_of_range(working: fx.GraphModule, found: Legalized) -> None:
    """Finds operators whose scales XNNPACK refuses; they run in float between conversions."""
    for node in working.graph.nodes:
        output = quantized_output(after_activation(node))
        entered = [static_qparams(n) for n in node.all_input_nodes if is_dequantize(n)]
        scales = [p.scale for p in entered if p is not None]
        if output is None or not scales or is_dequantize(node) or is_quantize(node):
            continue
        ratio, kind = _ratio(node, scales, output.scale)
        low, high = RATIOS.get(kind, (0.0, float("inf")))
        if not low <= ratio < high:
            reason = f"the ratio {ratio:.3g} of its scales is outside XNNPACK's [{low:.3g}, {high:.3g})"
            found.floats[node.name] = reason


def _ratio(node: fx.Node, scales: list[float], output: float) -> tuple[float, str]:
    name = operator_name(node)
    if name in ("aten::add", "aten::sub"):
        return max((s / output for s in scales), key=lambda r: max(r, 1 / r)), "add"
    if name == "aten::mul":
        return (scales[0] * scales[-1]) / output, "mul"
    if name in ("aten::leaky_relu", "aten::mean") or clamp_bounds(node) is not None:
        return scales[0] / output, "convert"
    return 1.0, "none"
