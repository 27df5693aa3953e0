"""Ratios of scales that XNNPACK's kernels express; operators outside are found, with the reason."""

from torch import fx

from quantplug.core.graph.facts import operator_name
from quantplug.core.peers.torch_names import pytree
from quantplug.core.qdq.nodes import is_dequantize
from quantplug.core.qdq.qparams import quantized_output, static_qparams
from quantplug.core.specs.limits import XNNPACK_RATIOS
from quantplug.lowering.xnnpack.legalize.legalized import Legalized
from quantplug.lowering.xnnpack.legalize.operators import after_activation, calls

_CONVERTS = ("leaky_relu", "relu", "hardtanh", "relu6", "clamp", "mean", "adaptive_avg_pool2d")
_KERNELS = {"aten::add": "add", "aten::sub": "add", "aten::mul": "mul"} | {
    f"aten::{name}": "convert" for name in _CONVERTS
}


def find_scale_ratios_out_of_range(working: fx.GraphModule, found: Legalized) -> None:
    """Finds operators whose scales XNNPACK refuses; they run in float between conversions."""
    for node in calls(working, _KERNELS):
        output = quantized_output(after_activation(node))
        entered = [static_qparams(n) for n in pytree.tree_leaves((node.args, node.kwargs)) if _is_read(n)]
        scales = [params.scale for params in entered if params is not None]
        if output is None or not scales:
            continue
        if reason := XNNPACK_RATIOS[_KERNELS[operator_name(node)]].objection(scales, output.scale):
            found.floats[node.name] = reason


def _is_read(operand: object) -> bool:
    return isinstance(operand, fx.Node) and is_dequantize(operand)
