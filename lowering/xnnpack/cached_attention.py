"""Attention to a cache by ExecuTorch's own kernel, which reads the cache where it lies.

Before: `quantplug::cached_attention`. After: `llama::custom_sdpa`, which runs beside the delegates.
"""

from typing import Any

import torch
from torch import fx

from quantplug.core.graph.editing import call_like
from quantplug.core.graph.facts import operands
from quantplug.core.graph.meta import ORIGINS, origins
from quantplug.lowering.cached_attention import CACHED_ATTENTION
from quantplug.lowering.executorch_names import attention_operator
from quantplug.lowering.rewrites.writing import Writer, done


def cached_attention_is_custom_sdpa(model: fx.GraphModule) -> fx.GraphModule:
    """Replaces attention to caches; those that begin at one position read it as one number."""
    numbers: dict[fx.Node, fx.Node] = {}
    for node in model.graph.find_nodes(op="call_function", target=CACHED_ATTENTION):
        values: dict[str, Any] = operands(node)
        start = values["start"]
        # Its value is known at run time only, so that nothing can be computed from it here.
        number = numbers[start] = numbers.get(start) or _called(node, torch.ops.aten.item.default, start)
        rows = (values["query"], values["keys"], values["values"])
        found = _called(node, attention_operator(), *rows, number, None, 0.0, True, values["scale"])
        Writer(model, node).replace(found)
    return done(model)


def _called(node: fx.Node, target: Any, *args: Any) -> fx.Node:
    with node.graph.inserting_before(node):
        created = call_like(node.graph, node, target, *args)
    ORIGINS.put(created, origins(node))
    return created
