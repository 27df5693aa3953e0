"""Long rows of elementwise operators, which XNNPACK merges wrongly.

Before: integer operators of one operand, one behind the other. After: the same, with one outside the delegate after
each eighth. XNNPACK makes one table of 256 integers of such a row when a program is loaded, float operators between
conversions included. Of more than about ten it frees a table that the program goes on to read, and frees it again when
it is released (`xnn_subgraph_fuse_unary_quantized_into_lut` in the version that ExecuTorch 1.4 has; nine operators were
clean and eleven were not under an allocator that checks).
"""

from torch import fx

from quantplug.lowering.xnnpack.conversions import is_dequantize, operator_name, quantized_output
from quantplug.lowering.xnnpack.legalize.legalized import Legalized

_UNARY = {
    "abs", "neg", "sigmoid", "tanh", "hardswish", "hardsigmoid", "gelu", "elu", "leaky_relu", "exp", "log", "sqrt",
    "rsqrt", "square", "floor", "ceil", "sin", "cos", "relu", "relu6", "hardtanh", "clamp",
}  # fmt: skip
_LONGEST = 8


def long_chains_are_broken(working: fx.GraphModule, found: Legalized) -> None:
    """Leaves an operator to ExecuTorch after the eighth integer operator of one operand in a row."""
    before: dict[fx.Node, int] = {}
    for node in working.graph.nodes:
        length = max((before.get(source, 0) for source in node.all_input_nodes), default=0)
        if operator_name(node).startswith(("quantized_decomposed::", "aten::view", "aten::reshape")):
            before[node] = length
        elif _is_unary(node):
            before[node] = (length + 1) % (_LONGEST + 1)
            if before[node] == 0:
                found.portable[node.name] = f"XNNPACK frees the tables of more than {_LONGEST} such operators in a row"


def _is_unary(node: fx.Node) -> bool:
    name = operator_name(node).removeprefix("aten::").removesuffix("_")
    return name in _UNARY and is_dequantize(node.args[0]) and quantized_output(node) is not None
