"""What a lowered model computes between its inputs and its outputs, and how long that takes.

Before: a q/dq graph with its layers. After: graphs of the same layers that return what each layer yields, which any
lowering or emulation takes: one through which values go as through the model, one in which each layer is given float
values, and one of a single layer, to be timed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, fx

from quantplug.core.graph.calling import return_flat
from quantplug.core.graph.editing import finish
from quantplug.core.graph.facts import sizes_of
from quantplug.core.graph.working_copy import working_copy
from quantplug.core.peers.torch_names import pytree
from quantplug.core.qdq.nodes import is_dequantize, is_quantize
from quantplug.core.report.layers import Piece, pieces
from quantplug.lowering.program import Program
from quantplug.lowering.timing import Taken, timed


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
    model = working_copy(converted)
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
    model = working_copy(converted)
    layers = told_layers(model)
    given = {piece.end.name: _new_input(piece) for piece in layers}
    ends = [_own_end(piece, given[piece.end.name]) for piece in layers]
    chosen = [place for place, piece in enumerate(layers) if only in (None, piece.root.name)]
    return _returning(model, [ends[place] for place in chosen], given, [layers[place].root.name for place in chosen])


def _new_input(piece: Piece) -> fx.Node:
    """Adds an input for the float value of a layer behind those that there are."""
    graph = piece.end.graph
    before = list(graph.find_nodes(op="placeholder"))
    with graph.inserting_after(before[-1] if before else None):
        node = graph.placeholder(f"float_{piece.end.name}")
    node.meta = {key: found for key, found in piece.end.meta.items() if key in ("val", "tensor_meta")}
    return node


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


def roundings_of(converted: fx.GraphModule, layer: str) -> Inside | None:
    """Returns the graph that rounds what a layer reads, and nothing else; None where it reads floats as they are."""
    alone = cut_apart(converted, layer)
    inputs = list(alone.model.graph.find_nodes(op="placeholder"))
    quantizes = [user for node in inputs for user in node.users if is_quantize(user)]
    ends = [user for quantize in quantizes for user in quantize.users if is_dequantize(user)]
    given = {name: node for node, name in zip(inputs, alone.values, strict=True)}
    return _returning(alone.model, ends, given, [layer]) if ends else None


def _returning(
    model: fx.GraphModule, ends: Sequence[fx.Node], given: dict[str, fx.Node], layers: Sequence[str]
) -> Inside:
    for guard in [node for node in model.graph.nodes if node.op == "call_module" and not node.users]:
        model.graph.erase_node(guard)
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


_NOTHING = Taken(0.0, 0.0, 0.0)
Lower: TypeAlias = Callable[[fx.GraphModule, tuple[Any, ...]], Program]
"""Makes a program of a graph and its inputs."""


class LayersAlone:
    """Times layers as programs of their own, which round float inputs and return floats.

    What it costs to call a program and to round its inputs is measured by another program that does only this, and
    taken off. It is not known how much of the rest goes into the result's way back to floats: the upper bound leaves
    all of it in.

    Args:
        converted: the q/dq graph, all inputs by position.
        values: float values by node name, the model's inputs included.
        lower: makes the programs.
    """

    def __init__(self, converted: fx.GraphModule, values: Mapping[str, Any], lower: Lower) -> None:
        self._converted, self._values, self._lower = converted, values, lower
        self._idle: dict[tuple[Any, ...], Taken] = {}

    def taken(self, layer: str) -> Taken:
        """Returns the time of a layer by its name.

        Raises:
            LoweringError: it cannot be lowered alone.
        """
        alone = cut_apart(self._converted, layer)
        whole = self._timed(alone)
        shapes = tuple(getattr(self._values[name], "shape", None) for name in alone.values)
        if shapes not in self._idle:  # the same to every layer that reads as much
            rounding = roundings_of(self._converted, layer)
            self._idle[shapes] = _NOTHING if rounding is None else self._timed(rounding)
        idle = self._idle[shapes]
        return Taken(max(whole.low - idle.high, 0.0), max(whole.middle - idle.middle, 0.0), whole.high)

    def _timed(self, inside: Inside) -> Taken:
        inputs = tuple(contiguous(self._values[name]) for name in inside.values)
        program = self._lower(inside.model, inputs)
        return timed(lambda: program(*inputs))


def contiguous(value: Any) -> Any:
    """Returns a tensor in one piece, anything else as it is."""
    return value.detach().contiguous() if isinstance(value, Tensor) else value
