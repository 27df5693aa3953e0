"""Runs of a model in float and in quantized form, side by side, of which every value can be read.

Before: the float graph that a q/dq graph was made from. After: the same graph with the q/dq graph's names, and runs of
both: in float, quantized, each layer quantized on float inputs, and float with one value changed.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.annotation.plan import transformed
from quantplug.core.batch_norms.inference import fold_batch_norms
from quantplug.core.graph.calling import by_position
from quantplug.core.graph.constants import written_buffers
from quantplug.core.graph.facts import (
    attribute,
    compute_nodes,
    module_path,
    operator_name,
    tensor_value,
    viewed_node,
    written_argument,
)
from quantplug.core.graph.meta import TRANSFORMS
from quantplug.core.graph.working_copy import over_same_tensors, working_copy
from quantplug.core.qdq.integer_io import boundary_qparams
from quantplug.core.qdq.nodes import is_qdq
from quantplug.core.report.layers import Piece, Rounding, fixed_nodes, rounds_activations


def as_quantized(floats: fx.GraphModule, converted: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of a float graph with the rewrites and foldings that its q/dq graph has, so that names agree.

    Args:
        floats: the exported float graph.
        converted: the q/dq graph that was made of it, by whatever quantizer.
    """
    kept = {node.name for node in converted.graph.nodes}
    copied = transformed(working_copy(floats), TRANSFORMS.get(converted, ()))
    fold_batch_norms(copied, lambda producer, norm: "it was not folded" if norm.name in kept else None)
    _name_alike(copied.graph, converted.graph)
    return by_position(copied)


def _name_alike(floats: fx.Graph, converted: fx.Graph) -> None:
    """Gives operators that another exporter named otherwise its names, in place.

    They are those of the same module and kind, if each graph has as many of them; modules are called in one order.
    """
    graphs = (floats, converted)
    known = [{node.name for node in graph.nodes} for graph in graphs]
    groups: tuple[dict[tuple[str, str], list[fx.Node]], ...] = ({}, {})
    for graph, group, others in zip(graphs, groups, reversed(known), strict=True):
        for node in compute_nodes(graph):
            if not is_qdq(node) and node.name not in others:
                group.setdefault((module_path(node), operator_name(node)), []).append(node)
    for key, nodes in groups[1].items():
        others = groups[0].get(key, [])
        if len(others) == len(nodes):
            for node, other in zip(nodes, others, strict=True):
                other.name = node.name


class Run(fx.Interpreter):
    """Runs a graph and keeps what each node yields, as it was before an in-place operator changed it.

    Attributes:
        kept: by node.
        writes: whether an operator of the graph writes into memory.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.kept: dict[fx.Node, Any] = {}
        self._state = {path: attribute(module, path).clone() for path in written_buffers(module.graph)}
        self.writes = any(written_argument(node) is not None for node in module.graph.nodes)

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Reads a buffer that the graph writes from the run's own copy."""
        return self._state[str(target)] if str(target) in self._state else super().get_attr(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node and keeps its value."""
        value = super().run_node(n)
        self.kept[n] = self.own_copy(value)
        return value

    def own_copy(self, value: Any) -> Any:
        """Returns a tensor that no in-place operator of the graph changes."""
        return value.clone() if self.writes and isinstance(value, Tensor) else value

    def __call__(self, *inputs: Any) -> Any:
        """Runs the graph on positional inputs, as if for the first time, and returns what it does."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            return Run(self.module).run(*map(self.own_copy, inputs))  # type: ignore[arg-type]

    def values(self, inputs: tuple[Any, ...]) -> dict[fx.Node, Any]:
        """Runs the graph on positional inputs and returns what each node yields."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            self.run(*map(self.own_copy, inputs))
        return self.kept

    def rounded(self, rounding: Rounding, value: Tensor, constants: Mapping[fx.Node, Any]) -> Tensor:
        """Returns what a reader reads where a value is rounded.

        Args:
            rounding: the node that rounds and the one that is read; a rounding of a rounded value rounds it alone.
            value: what is rounded.
            constants: what nodes of scales and zero points yield.
        """
        source = rounding.quantize.all_input_nodes[0]
        self.env = {**constants, source: value}
        self.env[rounding.quantize] = super().run_node(rounding.quantize)
        back: Tensor = super().run_node(rounding.back)
        return back


class OwnRun(Run):
    """Runs a q/dq graph in which each layer reads float values, and keeps what it yields before that is rounded.

    Attributes:
        own: by the node that ends a layer what its quantized operators yield.
    """

    def __init__(self, module: fx.GraphModule, layers: tuple[Piece, ...], floats: Mapping[str, Any]) -> None:
        super().__init__(module)
        self.own: dict[fx.Node, Any] = {}
        self._floats, self._ends = floats, {layer.end for layer in layers}
        self._constants = fixed_nodes(module.graph)

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node; roundings of activations let floats through, and what ends a layer goes on as float."""
        if rounds_activations(n, self._constants):
            self.kept[n] = self.env[n.all_input_nodes[0]]
            return self.kept[n]
        value = super().run_node(n)
        if n.op == "placeholder" and n.name in self._floats:  # the q/dq graph may take integers
            value = self._floats[n.name]
        if n in self._ends:
            self.own[n] = self.own_copy(value)
            known = self._floats.get(n.name)
            # What is written through a view is to be seen by whoever reads the memory.
            is_view = self.writes and viewed_node(n) is not None and written_argument(n) is None
            value = self.own_copy(known) if _alike(known, value) and not is_view else value
        self.kept[n] = self.own_copy(value)
        return value


def _alike(known: Any, value: Any) -> bool:
    if isinstance(known, Tensor) and isinstance(value, Tensor):
        return known.shape == value.shape
    return known is not None and not isinstance(value, Tensor)


class FloatRuns:
    """The float run of one batch, and runs that differ from it by one value.

    Attributes:
        values: by node name.
    """

    def __init__(self, floats: fx.GraphModule, inputs: tuple[Any, ...]) -> None:
        self._model = floats
        self._env = dict(Run(floats).values(inputs))
        self._nodes = {node.name: node for node in floats.graph.nodes}
        self.values = {node.name: value for node, value in self._env.items()}

    def result(self) -> Any:
        """What the float model returns."""
        return self._env[self._model.graph.output_node()]

    def operand(self, name: str, operand: str, find: Any) -> Any:
        """Returns an operand's value of the node of a name; None where there is none."""
        node = self._nodes.get(name)
        found = None if node is None else find(node).get(operand)
        return self._env.get(found) if isinstance(found, fx.Node) else None

    def with_value(self, name: str, value: Tensor, apart: Mapping[str, Tensor]) -> Any:
        """Returns what the float model returns where one node yields another value, None if it has no such node.

        Args:
            name: of the node.
            value: what it yields.
            apart: readers, by name, that read something else.
        """
        node = self._nodes.get(name)
        if node is None:
            return None
        behind = _readers(node)
        known = {other: found for other, found in self._env.items() if other not in behind}
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            run = _ReadApart(self._model, node, value.clone(), apart)
            return run.run(initial_env={**known, node: run.value}, enable_io_processing=False)


class _ReadApart(Run):
    """Runs a graph of which some nodes read another value of a node than the others do."""

    def __init__(self, module: fx.GraphModule, node: fx.Node, value: Tensor, apart: Mapping[str, Tensor]) -> None:
        super().__init__(module)
        self.value, self._node, self._apart = value, node, apart

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node on the value that is for it."""
        self.env[self._node] = self._apart.get(n.name, self.value)
        return super().run_node(n)


def _readers(node: fx.Node) -> set[fx.Node]:
    """Returns all that a node's value reaches, also through memory that it is written into."""
    found, pending = set[fx.Node](), list(node.users)
    while pending:
        user = pending.pop()
        if user in found:
            continue
        found.add(user)
        pending += user.users
        written = written_argument(user)
        pending += [] if written is None else [_memory(written)]
    return found - {node}


def _memory(view: fx.Node) -> fx.Node:
    """Returns the node whose memory a view shows."""
    while (base := viewed_node(view)) is not None:
        view = base
    return view


def with_float_inputs(floats: Any, converted: fx.GraphModule) -> fx.GraphModule:
    """Returns a graph whose inputs are those of the float model: data is held against it before anything is run.

    Args:
        floats: the float model; a module that is not exported yet has no graph to be asked.
        converted: the q/dq graph of it, whose inputs may be integers.
    """
    if isinstance(floats, torch.export.ExportedProgram):
        return by_position(floats.module())
    if isinstance(floats, fx.GraphModule):
        return by_position(floats)
    model = over_same_tensors(converted)
    for node, qargs in zip(model.graph.find_nodes(op="placeholder"), boundary_qparams(model)[0], strict=True):
        value = tensor_value(node)
        if qargs is not None and value is not None:
            node.meta["val"] = value.to(torch.float32)
    return model
