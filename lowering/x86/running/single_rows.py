"""A program that keeps a state, called with one row at a time, as a language model is for each token that it writes.

Before: a graph whose sizes are open. After: beside it the same graph where they are all 1, over the same state. There
kernels for few rows can be taken, which read weights faster and are slower on a whole prompt.
"""

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from quantplug.core.graph.facts import attribute
from quantplug.core.peers.torch_names import FakeTensorMode
from quantplug.lowering.signature import Signature, TensorInput
from quantplug.lowering.starting import starting, state_of
from quantplug.lowering.x86.cleaning import give_values
from quantplug.lowering.x86.running.packing import register_fakes


def of_single_rows(portable: fx.GraphModule, signature: Signature) -> fx.GraphModule | None:
    """Returns a copy of a graph with every open size 1; None where it has none, may not be 1, or keeps no state."""
    if not state_of(portable) or not _may_be_single(portable, signature):
        return None
    register_fakes()
    module, mode = starting(portable), FakeTensorMode()
    given = [each for each in signature.inputs if isinstance(each, TensorInput)]
    give_values(module, mode, [mode.from_tensor(torch.zeros(_single(each), dtype=each.dtype)) for each in given])
    _write_numbers(module.graph)
    return module


def is_single(signature: Signature, inputs: list[Any]) -> bool:
    """Tells whether every open size of a call is 1."""
    described = zip(signature.inputs, inputs, strict=True)
    return all(_single(given) == tuple(found.shape) for given, found in described if isinstance(given, TensorInput))


def share_state(module: fx.GraphModule, with_other: fx.GraphModule) -> fx.GraphModule:
    """Lets a graph write to the buffers of another, by their paths, and returns it."""
    for path in state_of(module):
        place, _, leaf = path.rpartition(".")
        setattr(attribute(module, place) if place else module, leaf, attribute(with_other, path))
    return module


def _single(given: TensorInput) -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) else 1 for size in given.sizes)


def _may_be_single(portable: fx.GraphModule, signature: Signature) -> bool:
    values = [node.meta.get("val") for node in portable.graph.nodes if node.op == "placeholder"]
    sizes: list[Any] = [size for found in values if isinstance(found, Tensor) for size in found.shape]
    opened = [size.node for size in sizes if not isinstance(size, int)]
    # Export says 2 of sizes from 0 or 1 on.
    may = all(symbol.expr.is_Symbol and symbol.shape_env.bound_sympy(symbol.expr).lower <= 2 for symbol in opened)
    return bool(opened) and may and all(isinstance(given, TensorInput) for given in signature.inputs)


def _write_numbers(graph: fx.Graph) -> None:
    """Writes sizes that were computed as the numbers that they are."""
    numbers = {node: node.meta["val"] for node in graph.nodes if type(node.meta.get("val")) is int}

    def written(node: fx.Node) -> Any:
        return numbers.get(node, node)

    for node in graph.nodes:
        node.args, node.kwargs = map_arg(node.args, written), map_arg(node.kwargs, written)
    for node in reversed(numbers):
        graph.erase_node(node)
