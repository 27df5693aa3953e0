"""Ratios of scales that XNNPACK's kernels express, and the reason against operators outside of them."""

from quantplug.core.graph.facts import operator_name
from quantplug.core.graph.operators import CLAMPS, schema_names
from quantplug.core.qdq.calls import QuantizedCall
from quantplug.core.qdq.nodes import is_dequantize
from quantplug.core.qdq.qparams import static_qparams
from quantplug.lowering.xnnpack.legalize.refusals import Refusal

# Ratios of scales outside of which XNNPACK refuses to create the operator (its operator sources, "scale
# ratio must be in"): smallest and first too large.
RATIOS = {
    "add": (2.0**-10, 2.0**8),
    "mul": (2.0**-16, 2.0**8),
    "convert": (2.0**-8, 2.0**7),
    "gemm": (0.0, 2.0**8),
}
_KINDS = {
    **dict.fromkeys(("aten::add", "aten::sub"), "add"),
    "aten::mul": "mul",
    **dict.fromkeys(schema_names((*CLAMPS, "leaky_relu", "mean")), "convert"),
}


def _outside(call: QuantizedCall) -> str | None:
    entered = [static_qparams(n) for n in call.node.all_input_nodes if is_dequantize(n)]
    scales = [params.scale for params in entered if params is not None]
    if call.output is None or not scales:
        return None
    kind = _KINDS[operator_name(call.node)]
    (low, high), ratio = RATIOS[kind], _ratio(kind, scales, call.output.scale)
    if low <= ratio < high:
        return None
    return f"the ratio {ratio:.3g} of its scales is outside XNNPACK's [{low:.3g}, {high:.3g})"


def _ratio(kind: str, scales: list[float], output: float) -> float:
    if kind == "add":
        return max((scale / output for scale in scales), key=lambda ratio: max(ratio, 1 / ratio))
    return scales[0] * scales[-1] / output if kind == "mul" else scales[0] / output


SCALES_OUT_OF_RANGE = Refusal(tuple(_KINDS), _outside)
