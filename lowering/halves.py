"""Weights that a q/dq graph stores in float16.

Before: a constant in float16 behind a cast to float32 that nothing may fuse. After: the same behind `aten.to`, which
every front end reads.
"""

import torch
from torch import fx

from quantplug.core.graph.facts import constant_value
from quantplug.core.qdq.nodes import CAST_OP

STORED = "it computes in float32, from a weight in float16"


def widening_casts(graph: fx.Graph) -> list[fx.Node]:
    """Returns the casts from constants in float16 to float32."""
    casts = graph.find_nodes(op="call_function", target=CAST_OP)
    return [node for node in casts if node.args[1] == torch.float32 and is_half_constant(node.args[0])]


def is_half_constant(node: object) -> bool:
    """Tells whether a node is a constant in float16."""
    value = constant_value(node) if isinstance(node, fx.Node) else None
    return value is not None and value.dtype == torch.float16


def spell_out_halves(graph: fx.Graph) -> dict[str, str]:
    """Writes the casts as `aten.to`, in place; returns by name what the report says of the operators that read them."""
    casts = widening_casts(graph)
    told = {user.name: STORED for node in casts for user in node.users}
    first: dict[str, fx.Node] = {}
    for node in casts:
        node.target = torch.ops.aten.to.dtype
        once = first.setdefault(str(node.all_input_nodes[0].target), node)
        if once is not node:  # widened once for all steps of a loop
            node.replace_all_uses_with(once)
            graph.erase_node(node)
    return told
