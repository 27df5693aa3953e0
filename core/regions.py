"""Submodels that control flow and scoped modes call: `cond`, `while_loop`, `scan`, `map`, `no_grad`, autocast.

Before: a graph whose higher-order operators take graph modules by `get_attr`. After: the attributes of
those that compute tensors, so that prepare and convert treat each as they treat the graph around it.
"""

import torch
from torch import fx

from quantplug.core.graph import attribute


def region_targets(model: fx.GraphModule) -> list[str]:
    """Returns the attributes of the submodels that a graph's higher-order operators call, in graph order.

    The condition of a `while_loop` is left out: its result is a decision and must not be rounded.
    """
    found: dict[str, None] = {}
    for node in model.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator):
            for argument in _submodels(node):
                if isinstance(attribute(model, str(argument.target)), fx.GraphModule):
                    found[str(argument.target)] = None
    return list(found)


def _submodels(node: fx.Node) -> list[fx.Node]:
    skipped = node.args[0] if node.target is torch.ops.higher_order.while_loop else None
    return [n for n in node.all_input_nodes if n.op == "get_attr" and n is not skipped]
