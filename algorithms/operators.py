"""The quantized operators of a calibrated model, and what each of them rounds.

Before: a prepared, calibrated graph, of any quantizer. After: the graph that convert makes of it, with its weights in
float before their quantize nodes, and for each quantized operator the pairs of quantize and dequantize nodes that are
its own: those of its weight, its bias and its inputs, and of its output where the quantizer asked for one. What lies
between two operators is rounded by both: either alone would round it.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import getitem

import torch
from torch import fx
from torchao.quantization.pt2e.quantizer import SharedQuantizationSpec

from quantplug.core.graph.constants import constant_nodes
from quantplug.core.graph.editing import call
from quantplug.core.graph.facts import attribute, compute_nodes
from quantplug.core.graph.meta import IO_DTYPES
from quantplug.core.graph.multiplications import multiplications
from quantplug.core.graph.operators import IDENTITIES, MAXIMA, MOVES, PADS, REPEATS, overloads_of
from quantplug.core.graph.submodels import submodel_targets
from quantplug.core.graph.union_find import UnionFind
from quantplug.core.graph.working_copy import over_same_tensors, rebuilt
from quantplug.core.observers.sharing import annotation_of
from quantplug.core.peers.torchao_names import is_marked
from quantplug.core.pt2e.convert import convert_pt2e
from quantplug.core.qdq.nodes import CAST_OP, is_dequantize, is_qdq, is_quantize
from quantplug.core.specs.decision import decision

# No result has a number that the operand has not, so that rounding before is rounding behind.
_MOVERS = overloads_of((*MOVES, *REPEATS, *IDENTITIES, *PADS, *MAXIMA))


@dataclass(frozen=True)
class QuantizedOperator:
    """An operator with what is fused to it.

    Attributes:
        node: the operator, in the converted graph; of a fused piece the one with the most multiplications.
        pairs: the dequantize nodes (or casts back) of what it rounds.
        constants: what its weight and bias are computed by, in graph order.
        start: the first node whose value the operator changes, constants aside.
    """

    node: fx.Node
    pairs: frozenset[fx.Node]
    constants: tuple[fx.Node, ...]
    start: fx.Node


@dataclass(frozen=True)
class QuantizedGraph:
    """A converted graph that can be run with any of its pairs, or none.

    Attributes:
        model: the graph module; weights are float before their quantize nodes, submodels of control flow are float.
        pairs: by dequantize node (or cast back) what quantizes for it.
        constants: the nodes that yield the same at every call.
        operators: in graph order.
        left: by node name why another quantized operator is none of them.
    """

    model: fx.GraphModule
    pairs: dict[fx.Node, fx.Node]
    constants: frozenset[fx.Node]
    operators: tuple[QuantizedOperator, ...]
    left: dict[str, str]


def quantized_graph(prepared: fx.GraphModule) -> QuantizedGraph:
    """Returns the converted graph of a calibrated model, with its quantized operators.

    Args:
        prepared: a prepared, calibrated graph module; it is not changed.

    Raises:
        CalibrationError: observers have seen no data, or data that was not finite.
        ConvertError: an observer gives no quantization.
    """
    source = over_same_tensors(prepared)
    IO_DTYPES.drop(source)  # so that its ends stay float
    model = convert_pt2e(source, fold_quantize=False)
    bodies = submodel_targets(model)
    left = {name: "it stands in a submodel of control flow" for body in bodies for name in _inside(model, body)}
    model = rebuilt(model, {body: _float(attribute(model, body)) for body in bodies})
    pairs = _pairs(model.graph, {node.name for node in prepared.graph.nodes})
    constants = _constants(model.graph)
    found = _Operators(model.graph, pairs, constants)
    return QuantizedGraph(model, pairs, constants, tuple(found.operators()), {**found.left, **left})


def _inside(model: fx.GraphModule, body: str) -> Iterator[str]:
    inner = attribute(model, body)
    for node in inner.graph.nodes:
        if _is_taken(node):
            yield f"{body}.{node.name}"
    for target in submodel_targets(inner):
        yield from (f"{body}.{name}" for name in _inside(inner, target))


def _float(body: fx.GraphModule) -> fx.GraphModule:
    """Returns a converted submodel in which nothing is rounded."""
    floats = over_same_tensors(body)
    for back, quantize in _pairs(floats.graph, set()).items():
        cut(back, quantize)
    floats.graph.eliminate_dead_code()
    return rebuilt(floats, {target: _float(attribute(floats, target)) for target in submodel_targets(floats)})


def cut(back: fx.Node, quantize: fx.Node) -> None:
    """Lets the readers of a pair read what it rounds; double precision is rounded in single, and stays double."""
    source, dtype = quantize.all_input_nodes[0], back.kwargs.get("out_dtype")
    if dtype is not None:
        source = call(back, torch.ops.aten.to.dtype, (source, dtype), back)
    back.replace_all_uses_with(source)


def _pairs(graph: fx.Graph, own: set[str]) -> dict[fx.Node, fx.Node]:
    """Returns by dequantize node, or cast back, what quantizes for it; those of the float model by name aside."""
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.name in own or not node.all_input_nodes:
            continue
        source = node.all_input_nodes[0]
        casts = node.target is CAST_OP and source.target is CAST_OP and source not in found
        if source.name not in own and (casts or (is_dequantize(node) and is_quantize(source))):
            found[node] = source
    return found


def _is_taken(node: fx.Node) -> bool:
    """Tells whether a quantizer took an operator."""
    decided, annotation = decision(node), annotation_of(node)
    if node.op != "call_function" or is_qdq(node):
        return False
    return (decided is not None and decided.quantized) or (annotation is not None and is_marked(annotation))


class _Operators:
    """Finds the operators of one graph.

    Attributes:
        left: by node name why a quantized operator is none.
    """

    def __init__(self, graph: fx.Graph, pairs: dict[fx.Node, fx.Node], constants: frozenset[fx.Node]) -> None:
        self.left: dict[str, str] = {}
        self._pairs = pairs
        self._order = {node: place for place, node in enumerate(graph.nodes)}
        self._constants = constants
        self._behind: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for back, quantize in pairs.items():
            self._behind[quantize.all_input_nodes[0]].append(back)
        self._taken = [node for node in compute_nodes(graph) if _is_taken(node)]

    def operators(self) -> Iterator[QuantizedOperator]:
        """Yields the operators in graph order, and says of others why they are none."""
        pieces = [tuple(piece) for piece in self._pieces()]
        moving = self._moving(pieces)
        for piece in pieces:
            own = self._own(piece)
            if own and piece not in moving:
                yield self._operator(piece, own)
                continue
            reason = "it moves numbers in the scale that another operator rounds them to"
            self.left |= {node.name: reason if own else "nothing of it is rounded" for node in piece}

    def _moving(self, pieces: list[tuple[fx.Node, ...]]) -> set[tuple[fx.Node, ...]]:
        """Returns the pieces that move what others round, some before and some behind them, in rows of any length."""
        moves = [piece for piece in pieces if _moves(piece)]
        found: set[tuple[fx.Node, ...]] = set()
        rounded = {self._pairs[back] for piece in pieces if not _moves(piece) for back in self._own(piece)}
        for piece in (*moves, *reversed(moves)):
            own = {self._pairs[back] for back in self._own(piece)}
            if not rounded.isdisjoint(own):
                rounded |= own
                found.add(piece)
        return found

    def _pieces(self) -> Iterable[tuple[fx.Node, ...]]:
        """Operators are fused where one reads another one's result as it is, and has no weight of its own."""
        joined = UnionFind(self._taken)
        for node in self._taken:
            if any(self._is_constant(read) for read in self._read(node) if read in self._pairs):
                continue
            for source in node.all_input_nodes:
                if source in joined:
                    joined.join(source, node)
        return [tuple(group) for group in joined.groups()]

    def _own(self, piece: tuple[fx.Node, ...]) -> frozenset[fx.Node]:
        read = {back for node in piece for back in self._read(node) if back in self._pairs}
        asked = (node for node in piece if (found := annotation_of(node)) is not None and found.output_qspec)
        return frozenset(read.union(*(self._behind[node] for node in asked)))

    def _operator(self, piece: tuple[fx.Node, ...], own: frozenset[fx.Node]) -> QuantizedOperator:
        constants = {read for node in piece for read in self._read(node) if self._is_constant(read)}
        changed = [*piece, *(back for back in own if not self._is_constant(back))]
        return QuantizedOperator(
            max(piece, key=multiplications),
            own,
            tuple(sorted(constants, key=self._order.__getitem__)),
            min(changed, key=self._order.__getitem__),
        )

    def _read(self, node: fx.Node) -> set[fx.Node]:
        """Returns what a node reads; of what is constant also what it is computed by."""
        found: set[fx.Node] = set()
        pending = list(node.all_input_nodes)
        while pending:
            read = pending.pop()
            if read not in found:
                found.add(read)
                pending += read.all_input_nodes if self._is_constant(read) else []
        return found

    def _is_constant(self, node: fx.Node) -> bool:
        return node in self._constants


def _constants(graph: fx.Graph) -> frozenset[fx.Node]:
    """Returns the nodes that yield the same at every call; torchao writes operators of blocks as packets."""
    found = constant_nodes(graph)
    for node in graph.nodes:
        computes = node.op == "call_function" and (is_qdq(node) or node.target is getitem)
        if computes and node.all_input_nodes and found.issuperset(node.all_input_nodes):
            found.add(node)
    return frozenset(found)


def _moves(piece: tuple[fx.Node, ...]) -> bool:
    """Tells whether a piece only puts numbers elsewhere, in the scale that they have."""
    annotations = [found for node in piece if (found := annotation_of(node)) is not None]
    specs = [spec for found in annotations for spec in (*(found.input_qspec_map or {}).values(), found.output_qspec)]
    shares = any(isinstance(spec, SharedQuantizationSpec) for spec in specs)
    return shares and all(node.target in _MOVERS for node in piece)
