"""Runs of a converted graph in float, in which one operator at a time rounds.

Before: a converted graph with its operators, and batches. After: the outputs in float, those with all that is rounded,
and for each operator those with its roundings alone. Such runs begin where the operator does, on the activations of
the float runs, which go on beside them: in memory is what two runs of each batch need, however many operators there
are. Batches go side by side, so that a weight is rounded once for all of them.

Where something else than the graph is what runs, a graph with these roundings alone is made, as convert would write it.
"""

import copy
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from quantplug.algorithms.operators import QuantizedGraph, QuantizedOperator, cut
from quantplug.core.calibration.node_by_node import BatchRun
from quantplug.core.calibration.outputs import floats_of
from quantplug.core.graph.editing import as_recorded, constant, finish, replace
from quantplug.core.graph.facts import tensor_value, written_argument
from quantplug.core.graph.working_copy import working_copy
from quantplug.core.peers.torch_names import pytree

Outputs: TypeAlias = list[Tensor]
"""What a model returns for all batches, tensors of floating point alone."""


def outputs(graph: QuantizedGraph, batches: Sequence[tuple[Any, ...]], active: Collection[fx.Node] = ()) -> Outputs:
    """Returns a model's floating point outputs.

    Args:
        graph: the converted graph.
        batches: positional inputs of each.
        active: the pairs that round; none gives the float model.
    """
    with torch.random.fork_rng(devices=[]):
        runs = _Runs(graph, [_Run(graph, batch, active) for batch in batches])
        return runs.finished(list(graph.model.graph.nodes))


def one_at_a_time(
    graph: QuantizedGraph, batches: Sequence[tuple[Any, ...]]
) -> Iterator[tuple[QuantizedOperator, Outputs]]:
    """Yields each operator with the outputs where it alone rounds, in the order in which they start."""
    nodes = list(graph.model.graph.nodes)
    starting: dict[fx.Node, list[QuantizedOperator]] = defaultdict(list)
    for operator in graph.operators:
        starting[operator.start].append(operator)
    with torch.random.fork_rng(devices=[]):
        runs = _Runs(graph, [_Run(graph, batch) for batch in batches])
        for place, node in enumerate(nodes):
            for operator in starting.pop(node, ()):
                # Random operators give it the numbers that the float runs get from here on.
                with torch.random.fork_rng(devices=[]):
                    found = runs.with_only(operator).finished(nodes[place:])
                yield operator, found
            if not starting:
                return
            runs.step(node)


def rounding_only(graph: QuantizedGraph, active: Collection[fx.Node]) -> fx.GraphModule:
    """Returns the converted graph in which only some pairs are left; their constants are stored as integers or halves.

    Args:
        graph: the converted graph; it is not changed.
        active: the pairs that are left.
    """
    model = working_copy(graph.model)
    own = dict(zip(graph.model.graph.nodes, model.graph.nodes, strict=True))
    for back, quantize in graph.pairs.items():
        if back not in active:
            cut(own[back], own[quantize])
    finish(model)
    left = {own[node] for node in graph.constants} & set(model.graph.nodes)
    _store(model, left, {own[graph.pairs[back]] for back in active} & left)
    return model


def _store(model: fx.GraphModule, constants: Collection[fx.Node], quantizes: Collection[fx.Node]) -> None:
    """Puts the integers of constants in the place of the nodes that quantize them."""
    run = fx.Interpreter(model, garbage_collect_values=False)
    for node in [node for node in model.graph.nodes if node in constants]:
        value = run.env[node] = run.run_node(node)
        if node in quantizes:
            stored = constant(node, f"{node.name}_stored", value.detach())
            stored.meta = {**node.meta, "val": as_recorded(value.detach(), tensor_value(node))}
            run.env[stored] = value
            replace(node, stored)
    finish(model)


class _Run(BatchRun):
    """A run in which a pair passes its tensor on as it is unless it is active."""

    def __init__(self, graph: QuantizedGraph, batch: tuple[Any, ...], active: Collection[fx.Node] = ()) -> None:
        super().__init__(graph.model, batch)
        self._pairs, self._active = graph.pairs, active
        self._quantizes = set(graph.pairs.values())
        self._writes = any(written_argument(node) is not None for node in graph.model.graph.nodes)

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node; a quantize node keeps what it is given for the dequantize nodes that read it."""
        if n.op == "placeholder":
            return self.env.get(n)
        if n in self._quantizes:
            return self.fetch_args_kwargs_from_env(n)
        if n not in self._pairs:
            return super().run_node(n)
        quantize = self._pairs[n]
        args, kwargs = self.env[quantize]
        if n not in self._active:
            return args[0].to(n.kwargs.get("out_dtype", args[0].dtype))
        self.env[quantize] = getattr(self, quantize.op)(quantize.target, args, kwargs)
        rounded = super().run_node(n)
        self.env[quantize] = args, kwargs
        return rounded

    def with_only(self, operator: QuantizedOperator, constants: dict[fx.Node, Any]) -> "_Run":
        """Returns a run that goes on from here with one operator's pairs, and with its constants."""
        other = copy.copy(self)
        other.env, other.own, other._active = dict(self.env), dict(self.own), operator.pairs
        if self._writes:
            other._own_memory()
        other.env |= {node: value for node, value in constants.items() if node in other.env}
        return other

    def constants_of(self, operator: QuantizedOperator) -> dict[fx.Node, Any]:
        """Returns what an operator's weight and bias are computed by, rounded."""
        alone = copy.copy(self)
        alone.env, alone._active = {}, operator.pairs
        for node in operator.constants:
            alone.env[node] = alone.run_node(node)
        return alone.env

    def _own_memory(self) -> None:
        """Copies what in-place operators might write, so that views of one memory stay views of one."""
        held = {value.untyped_storage().data_ptr() for value in self.module.state_dict(keep_vars=True).values()}
        memo: dict[int, Any] = {}

        def copied(value: Tensor) -> Tensor:
            memory: Any = value.untyped_storage()
            if memory.data_ptr() in held:
                return value
            if memory.data_ptr() not in memo:
                memo[memory.data_ptr()] = memory.clone()
            own = torch.empty(0, dtype=value.dtype)
            return own.set_(memo[memory.data_ptr()], value.storage_offset(), value.size(), value.stride())

        self.env = {node: pytree.tree_map_only(Tensor, copied, value) for node, value in self.env.items()}
        self.own = {name: copied(value) for name, value in self.own.items()}


class _Runs:
    """Runs of several batches side by side, which share their constants."""

    def __init__(self, graph: QuantizedGraph, runs: list[_Run]) -> None:
        self._graph, self._runs = graph, runs

    def step(self, node: fx.Node) -> None:
        """Runs a node in all of them."""
        shared = [self._runs[0].run_node(node)] * len(self._runs) if node in self._graph.constants else None
        for place, run in enumerate(self._runs):
            run.env[node] = shared[place] if shared else run.run_node(node)
            run.let_go(node)

    def finished(self, nodes: list[fx.Node]) -> Outputs:
        """Runs the nodes that are left and returns the outputs that have an error, batch after batch."""
        for node in nodes:
            self.step(node)
        return [value for run in self._runs for value in floats_of(run.env[nodes[-1]])]

    def with_only(self, operator: QuantizedOperator) -> "_Runs":
        """Returns runs that go on from here with one operator's pairs."""
        constants = self._runs[0].constants_of(operator)
        return _Runs(self._graph, [run.with_only(operator, constants) for run in self._runs])
