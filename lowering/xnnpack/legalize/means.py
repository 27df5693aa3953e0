"""Integer means of open sizes: ExecuTorch 1.4's XNNPACK keeps the memory of their sums at an earlier call's size.

Before: any legalized q/dq graph. After: the same, such means are found and stay float.
"""

from torch import fx

from quantplug.core.graph.facts import tensor_value
from quantplug.core.qdq.qparams import quantized_output
from quantplug.lowering.xnnpack.legalize.legalized import Legalized
from quantplug.lowering.xnnpack.legalize.operators import calls

_MEANS = {"aten::mean", "aten::adaptive_avg_pool2d"}
_REASON = "XNNPACK's integer mean is wrong in calls that are larger than an earlier one, and its size is open"


def find_means_that_grow(working: fx.GraphModule, found: Legalized) -> None:
    """Finds integer means whose number of sums differs between calls; they run in float between conversions."""
    for node in calls(working, _MEANS):
        value = tensor_value(node)
        sizes = () if value is None else tuple(value.shape)
        if quantized_output(node) is not None and not all(isinstance(size, int) for size in sizes):
            found.floats[node.name] = _REASON
