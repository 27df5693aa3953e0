"""What a lowered model computes between its inputs and its outputs, and how long that takes.

Before: a q/dq graph with its layers. After: graphs of the same layers that return what each layer yields, which any
lowering or emulation takes: one through which values go as through the model, one in which each layer is given float
values, and one of a single layer, to be timed.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.graph.calling import return_flat
from quantplug.core.graph.editing import finish
from quantplug.core.graph.facts import sizes_of
from quantplug.core.graph.working_copy import over_same_tensors
from quantplug.core.peers.torch_names import pytree
from quantplug.core.report.layers import Piece, pieces
from quantplug.lowering.program import Program

# Calls that are timed: so many at least, and more as long as they take less than so many seconds together.
_CALLS, _SECONDS = (21, 201), 0.2


@dataclass(frozen=True)
class Inside:
    """A graph that returns what layers yield.

    Attributes:
        model: the graph module; it takes its inputs by position.
        layers: names of the layers, in the order of what it returns.
        values: for each input behind the model's own the name of the node whose float value it takes.
    """

    model: fx.GraphModule
    layers: tuple[str, ...]
    values: tuple[str, ...] = ()


def told_layers(converted: fx.GraphModule) -> tuple[Piece, ...]:
    """Returns the layers that compute or round a tensor, inputs aside."""
    found = (piece for piece in pieces(converted.graph) if not piece.passes_on and piece.root.op != "placeholder")
    return tuple(piece for piece in found if sizes_of(piece.end))


def with_values(converted: fx.GraphModule) -> Inside:
    """Returns the graph with what each layer yields behind its own outputs, as readers read it.

    Args:
        converted: a q/dq graph that takes its inputs by position; it is not changed.
    """
    model = over_same_tensors(converted)
    layers = told_layers(model)
    ends = [piece.roundings[0].back if piece.roundings else piece.end for piece in layers]
    return_flat(model, [*pytree.tree_leaves(model.graph.output_node().args[0]), *ends])
    return Inside(model, tuple(piece.root.name for piece in layers))


def cut_apart(converted: fx.GraphModule, only: str | None = None) -> Inside:
    """Returns the graph of which each layer reads float values that are given, and rounds them itself.

    Args:
        converted: as for `with_values`.
        only: the name of the one layer that is left; None for all.
    """
    model = over_same_tensors(converted)
    layers = told_layers(model)
    last = list(model.graph.find_nodes(op="placeholder"))[-1:]
    given: dict[str, fx.Node] = {}
    ends = []
    for piece in layers:
        with model.graph.inserting_after(last[0] if last else None):
            last = [model.graph.placeholder(f"float_{piece.end.name}")]
        last[0].meta = {key: found for key, found in piece.end.meta.items() if key in ("val", "tensor_meta")}
        given[piece.end.name] = last[0]
        ends.append(_own_end(piece, last[0]))
    chosen = [place for place, piece in enumerate(layers) if only in (None, piece.root.name)]
    return _returning(model, [ends[place] for place in chosen], given, [layers[place].root.name for place in chosen])


def _own_end(piece: Piece, given: fx.Node) -> fx.Node:
    """Lets the readers of a layer read what is given; returns what the layer itself yields, rounded."""
    end = piece.end
    end.replace_all_uses_with(given)
    if not piece.roundings:
        return end
    rounding, graph = piece.roundings[0], end.graph
    with graph.inserting_after(end):
        quantize = graph.node_copy(rounding.quantize, lambda node: end if node is given else node)
    with graph.inserting_after(quantize):
        return graph.node_copy(rounding.back, lambda node: quantize if node is rounding.quantize else node)


def roundings_of(converted: fx.GraphModule, layer: str) -> Inside:
    """Returns the graph that rounds what a layer reads, and nothing else: what it costs to come in and go out."""
    alone = cut_apart(converted, layer)
    model = over_same_tensors(alone.model)
    inputs = list(model.graph.find_nodes(op="placeholder"))
    read = [node for node in model.graph.nodes if len(node.args) and node.args[0] in {u for i in inputs for u in i.users}]
    ends = [node for node in read if node.all_input_nodes and node.all_input_nodes[0].all_input_nodes[:1]]
    given = {name: node for node, name in zip(inputs, alone.values, strict=True)}
    return _returning(model, ends[:1] or inputs[:1], given, [layer])


def _returning(
    model: fx.GraphModule, ends: Sequence[fx.Node], given: dict[str, fx.Node], layers: Sequence[str]
) -> Inside:
    own = [node for node in model.graph.find_nodes(op="placeholder") if node not in given.values()]
    names = {node: node.name for node in own} | {node: name for name, node in given.items()}
    model.graph.set_codegen(fx.graph.CodeGen())  # inputs and outputs one behind the other, in no containers
    model.graph.output_node().args = (tuple(ends),)
    model.graph.eliminate_dead_code()
    for node in [node for node in names if not node.users]:
        model.graph.erase_node(node)
    left = list(model.graph.find_nodes(op="placeholder"))
    finish(model)
    return Inside(model, tuple(layers), tuple(names[node] for node in left))


@dataclass(frozen=True)
class Taken:
    """How long something takes, in microseconds a call.

    Attributes:
        low: a lower bound.
        middle: the median.
        high: an upper bound.
    """

    low: float
    middle: float
    high: float


def timed(run: Callable[[], Any]) -> Taken:
    """Returns the quartiles of a call's time, of calls one behind the other."""
    found: list[float] = []
    for _ in range(3):
        run()
    began = time.perf_counter()
    while len(found) < _CALLS[0] or (len(found) < _CALLS[1] and time.perf_counter() - began < _SECONDS):
        start = time.perf_counter()
        run()
        found.append((time.perf_counter() - start) * 1e6)
    low, middle, high = statistics.quantiles(found, n=4)
    return Taken(low, middle, high)


def time_alone(
    converted: fx.GraphModule, layer: str, values: dict[str, Any], lower: Callable[[fx.GraphModule, tuple[Any, ...]], Program]
) -> Taken:
    """Times a layer as a program of its own, which rounds float inputs and returns floats.

    What it costs to call a program and to round its inputs is measured by another program that does only this, and
    taken off. It is not known how much of the rest goes into its result's way back to floats: the upper bound leaves
    all of it in.

    Args:
        converted: the q/dq graph, all inputs by position.
        layer: the name of the layer.
        values: float values by node name, the model's inputs included.
        lower: makes a program of a graph and its inputs.

    Raises:
        LoweringError: the layer cannot be lowered alone.
    """
    whole = _timed_program(cut_apart(converted, layer), values, lower)
    idle = _timed_program(roundings_of(converted, layer), values, lower)
    middle = max(whole.middle - idle.middle, 0.0)
    return Taken(max(whole.low - idle.high, 0.0), middle, whole.high)


def _timed_program(
    inside: Inside, values: dict[str, Any], lower: Callable[[fx.GraphModule, tuple[Any, ...]], Program]
) -> Taken:
    inputs = tuple(contiguous(values[name]) for name in inside.values)
    program = lower(inside.model, inputs)
    return timed(lambda: program(*inputs))


def contiguous(value: Any) -> Any:
    """Returns a tensor in one piece, anything else as it is."""
    return value.detach().contiguous() if isinstance(value, Tensor) else value


class TimedRun(fx.Interpreter):
    """Runs a lowered graph and notes how long each operator takes.

    Attributes:
        seconds: by node, one number a run.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.seconds: dict[fx.Node, list[float]] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node; operands are fetched before the clock runs."""
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        target: Any = n.target
        start = time.perf_counter()
        value = target(*args, **kwargs)
        self.seconds.setdefault(n, []).append(time.perf_counter() - start)
        return value


def node_times(module: fx.GraphModule, inputs: Sequence[Any]) -> dict[fx.Node, Taken]:
    """Returns the quartiles of each operator's time of a graph that runs by itself, in microseconds a call.

    Args:
        module: the graph of kernels.
        inputs: flat.
    """
    run = TimedRun(module)
    with torch.inference_mode():
        for _ in range(3):
            run.run(*inputs, enable_io_processing=False)
        run.seconds.clear()
        began, calls = time.perf_counter(), 0
        while calls < _CALLS[0] or (calls < _CALLS[1] and time.perf_counter() - began < 5 * _SECONDS):
            run.run(*inputs, enable_io_processing=False)
            calls += 1
    quartiles = {node: statistics.quantiles(found, n=4) for node, found in run.seconds.items()}
    return {node: Taken(*(1e6 * each for each in found)) for node, found in quartiles.items()}
