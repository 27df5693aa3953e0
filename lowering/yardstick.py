"""What a q/dq graph computes on example inputs, as the measure of any program that was made of it."""

import math
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.graph.multiplications import multiplications
from quantplug.core.peers.torch_names import pytree
from quantplug.lowering.agreement import agreement
from quantplug.lowering.program import Program
from quantplug.lowering.signature import Signature, TensorInput
from quantplug.lowering.starting import starting, state_of, twin


class Yardstick:
    """What a q/dq graph computes on example inputs, in two calls where it has a state.

    Attributes:
        graph: the graph as lowerings begin with it.
        inputs: the example inputs, by position.
        has_state: whether the graph writes buffers.
        expected: what it returns, in one call or two.
        products: names of its nodes that multiply tensors.

    Raises:
        LoweringError: the inputs do not fit the graph.
    """

    def __init__(self, converted: fx.GraphModule, inputs: tuple[Any, ...]) -> None:
        self.graph, self.inputs = starting(converted), inputs
        self._signature = Signature.of_graph(self.graph, inputs)
        self._signature.flatten(inputs)
        self.has_state = bool(state_of(self.graph))
        model = twin(self.graph)
        with torch.no_grad():
            self.expected = [_cloned(model(*inputs)) for _ in range(2 if self.has_state else 1)]
        self.products = {node.name for node in self.graph.graph.nodes if multiplications(node)}

    def decibels(self, program: Program) -> float | None:
        """Returns how near a program is to the graph; None where it computes the same.

        Raises:
            LoweringError: it computes something else.
        """
        program.restart()
        program(*self.inputs)
        program.restart()  # from here on what a kernel left behind in the first call shows
        found = min(self._near(program, expected) for expected in self.expected)
        program.restart()
        return found if math.isfinite(found) else None

    def _near(self, program: Program, expected: Any) -> float:
        return agreement(program(*self.inputs), expected, self.graph, self.inputs)

    def described(self) -> str:
        """Returns dtypes and sizes of the inputs."""
        leaves = pytree.tree_leaves(self.inputs)
        given = zip(self._signature.inputs, leaves, strict=True)
        return ", ".join(_described(each, leaf) for each, leaf in given if isinstance(leaf, Tensor))


def _cloned(outputs: Any) -> Any:
    return pytree.tree_map_only(Tensor, torch.clone, outputs)


def _described(given: Any, leaf: Tensor) -> str:
    known = given.sizes if isinstance(given, TensorInput) else tuple(leaf.shape)
    sizes = [f"{k}={v}" if isinstance(k, str) else f"{v}" for k, v in zip(known, leaf.shape, strict=True)]
    return f"{str(leaf.dtype).removeprefix('torch.')} ({', '.join(sizes)})"
