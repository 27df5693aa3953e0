"""Control flow in plain Python, so that training reaches what its submodels hold.

Before: a graph with `cond`, `while_loop`, `scan` or `map` whose submodels hold their parameters. PyTorch
differentiates these operators with respect to their operands only, by tracing the submodels: parameters inside
would get no gradient, fake quantizes no values. After: the same graph, in which a function that goes step by step
stands for each operator; convert puts the operators back.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

_HIGHER = torch.ops.higher_order


def take_branch(decision: Any, one: Any, other: Any, operands: Sequence[Any]) -> Any:
    """Stands for `cond`."""
    return (one if decision else other)(*operands)


def repeat_while(condition: Any, body: Any, carried: Sequence[Any], operands: Sequence[Any]) -> Any:
    """Stands for `while_loop`."""
    while condition(*carried, *operands):
        carried = body(*carried, *operands)
    return carried


def go_through(step: Any, carried: Sequence[Any], along: Sequence[Tensor], operands: Sequence[Any]) -> Any:
    """Stands for `scan`: the last carried values, then what the steps yield, stacked."""
    count, yielded = len(carried), []
    for row in zip(*along, strict=True):
        results = step(*carried, *row, *operands)
        carried = results[:count]
        yielded.append(results[count:])
    return [*carried, *(torch.stack(values) for values in zip(*yielded, strict=True))]


def apply_to_each(body: Any, along: Sequence[Tensor], operands: Sequence[Any]) -> Any:
    """Stands for `map`."""
    rows = [body(*row, *operands) for row in zip(*along, strict=True)]
    return tuple(torch.stack(values) for values in zip(*rows, strict=True))


IN_PYTHON: Mapping[Any, Callable[..., Any]] = {
    _HIGHER.cond: take_branch,
    _HIGHER.while_loop: repeat_while,
    _HIGHER.scan: go_through,
    _HIGHER.map_impl: apply_to_each,
}
"""The function that stands for each operator."""

_AS_OPERATORS: Mapping[Any, Any] = {function: operator for operator, function in IN_PYTHON.items()}


def operator_of(node: fx.Node) -> Any:
    """Returns the target of a node, or the operator that it stands for."""
    return _AS_OPERATORS.get(node.target, node.target)


def run_in_python(model: fx.GraphModule) -> None:
    """Replaces the operators of a graph by what stands for them, in place."""
    for operator, function in IN_PYTHON.items():
        for node in model.graph.find_nodes(op="call_function", target=operator):
            node.target = function
    model.recompile()


def run_as_operators(graph: fx.Graph) -> None:
    """Takes `run_in_python` back, in place."""
    for node in graph.nodes:
        node.target = operator_of(node)
