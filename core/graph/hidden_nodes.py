"""Graph rewrites that see a part of a graph only.

Before: a graph, a rewrite, and the nodes that it must leave alone. After: the rewritten graph, in which those nodes
are what they were.

Meanwhile they are calls of one opaque function, which no pattern knows and which computes the same. It counts as
having side effects, or a rewrite that removes dead code would remove operators that change a tensor in place.
"""

from collections.abc import Callable, Iterable

from torch import fx
from torch.fx.node import has_side_effect

from quantplug.core.graph.facts import require_graph_module
from quantplug.core.peers.torch_names import OpOverload


@has_side_effect
def out_of_sight(operator: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Stands for an operator that a rewrite must not see, and computes what it computes."""
    return operator(*args, **kwargs)


def transform_without(
    model: fx.GraphModule, outside: Iterable[fx.Node], transform: Callable[[fx.GraphModule], fx.GraphModule]
) -> fx.GraphModule:
    """Runs a rewrite on a graph some of whose nodes it must leave alone.

    Args:
        model: the graph, changed in place.
        outside: the nodes to leave alone; only calls of operators need it.
        transform: a function from a graph module to the same or another.

    Raises:
        ModelError: the rewrite returns no graph module.
    """
    for node in outside:
        if isinstance(node.target, OpOverload):
            node.args, node.target = (node.target, *node.args), out_of_sight
    try:
        found = require_graph_module(transform(model), "annotate, after the transform,")
        _reveal(found)
    finally:
        _reveal(model)
    return found


def _reveal(model: fx.GraphModule) -> None:
    hidden = [node for node in model.graph.nodes if node.target is out_of_sight]
    for node in hidden:
        operator, *args = node.args
        assert isinstance(operator, OpOverload)
        node.target, node.args = operator, tuple(args)
    if hidden:
        model.recompile()
