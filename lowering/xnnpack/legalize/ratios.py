"""Ratios of scales that XNNPACK's kernels express, and the reason against operators outside of them."""

from quantplug.core.graph.facts import operator_name
from quantplug.core.graph.operators import CLAMPS, schema_names
from quantplug.core.peers.torch_names import pytree
from quantplug.core.qdq.calls import QuantizedCall
from quantplug.core.qdq.nodes import is_dequantize
from quantplug.core.qdq.qparams import static_qparams
from quantplug.core.specs.limits import XNNPACK_RATIOS
from quantplug.lowering.xnnpack.legalize.refusals import Refusal

_KINDS = {
    **dict.fromkeys(("aten::add", "aten::sub"), "add"),
    "aten::mul": "mul",
    **dict.fromkeys(schema_names((*CLAMPS, "leaky_relu", "mean", "adaptive_avg_pool2d")), "convert"),
}


def _outside(call: QuantizedCall) -> str | None:
    read = [leaf for leaf in pytree.tree_leaves((call.node.args, call.node.kwargs)) if is_dequantize(leaf)]
    scales = [params.scale for params in map(static_qparams, read) if params is not None]
    if call.output is None or not scales:
        return None
    return XNNPACK_RATIOS[_KINDS[operator_name(call.node)]].objection(scales, call.output.scale)


SCALES_OUT_OF_RANGE = Refusal(tuple(_KINDS), _outside)
