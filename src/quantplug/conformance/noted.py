"""What a quantizer wrote onto a graph, before anything is inserted for it.

Before: a graph with anybody's annotations. After: `Notes`, plain values by names of nodes, which stay when the graph
is prepared. `Noting` stands in for a quantizer and takes the notes where torchao's `prepare_pt2e` asks it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torchao.quantization.pt2e.quantizer import QuantizationSpecBase, Quantizer

from quantplug.conformance.pieces import Placed
from quantplug.core.annotation.verify import verify_annotations
from quantplug.core.errors import AnnotationError
from quantplug.core.graph.facts import operands, operator_name
from quantplug.core.observers.scheme import PER_CHANNEL
from quantplug.core.observers.sharing import Point, Sharing, annotated_specs, observer_key
from quantplug.core.peers.torch_names import pytree
from quantplug.core.qdq.nodes import is_dynamic, stored_dtype
from quantplug.core.specs.stored_dtypes import dtype_range


@dataclass(frozen=True)
class Numbers:
    """What a spec asks for, and what a dequantize node has of it.

    Attributes:
        dtype: of the integers.
        low: the smallest of them.
        high: the greatest.
        axis: of the channels, None for one scale.
        is_dynamic: whether the scale is found at run time.
    """

    dtype: torch.dtype
    low: int
    high: int
    axis: int | None
    is_dynamic: bool

    def __str__(self) -> str:
        kind = "dynamic " if self.is_dynamic else ""
        channels = "" if self.axis is None else f" per channel along axis {self.axis}"
        return f"{kind}{str(self.dtype).removeprefix('torch.')} {self.low}..{self.high}{channels}"

    @property
    def bits(self) -> int:
        """Bits of the range."""
        return (self.high - self.low).bit_length()


@dataclass(frozen=True)
class Asked:
    """What is annotated at one place.

    Attributes:
        numbers: what is asked for, None to leave it float.
        group: the number of the group of places that share a scale.
        observer: how the range is found.
    """

    numbers: Numbers | None
    group: int
    observer: str


@dataclass(frozen=True)
class Operator:
    """An operator and what is annotated at it.

    Attributes:
        name: of its node.
        kind: of ATen, without overload and underscore.
        inputs: by the position among the flattened operands what is asked for there.
        output: what is asked for there.
        operands: how many are written, lists of them taken apart.
    """

    name: str
    kind: str
    inputs: Mapping[int, Asked]
    output: Asked | None
    operands: int

    @property
    def asked(self) -> Iterator[Asked]:
        """All that is annotated."""
        yield from self.inputs.values()
        yield from [self.output] if self.output is not None else []


@dataclass(frozen=True)
class Notes:
    """A graph's annotations.

    Attributes:
        operators: by the names of their nodes, inputs among them, whose results may be annotated as well.
        pieces: for each piece its operators, the last first.
        changed: whether the graph is another one after `annotate`.
        result: what the annotated graph yields, flat.
    """

    operators: Mapping[str, Operator]
    pieces: Mapping[Placed, tuple[Operator, ...]]
    changed: bool
    result: tuple[Any, ...]


# For each piece its nodes in a graph, the last first.
Pieces = Callable[[fx.GraphModule], Mapping[Placed, list[fx.Node]]]


def notes_of(model: fx.GraphModule, before: str, inputs: tuple[Any, ...], pieces: Pieces) -> Notes:
    """Returns what is annotated on a graph.

    Args:
        model: the graph.
        before: what it looked like before it was annotated, see `looks`.
        inputs: what it is run on.
        pieces: finds the nodes of each piece.

    Raises:
        AnnotationError: an annotation cannot be carried out.
    """
    sharing = verify_annotations(model)
    specs = annotated_specs(model.graph)

    def asked(point: Point) -> Asked | None:
        return _asked(sharing, point) if point in specs else None

    found = {}
    for node in model.graph.nodes:
        if node.op in ("call_function", "placeholder"):
            given = {i: asked((x, node)) for i, x in enumerate(flat(node)) if isinstance(x, fx.Node)}
            own = {i: one for i, one in given.items() if one is not None}
            found[node.name] = Operator(node.name, kind_of(node), own, asked(node), len(flat(node)))
    model.recompile()  # a quantizer may leave that to who prepares
    with torch.no_grad():
        result = pytree.tree_leaves(model(*(x.clone() for x in inputs)))
    mine = {placed: tuple(found[node.name] for node in nodes) for placed, nodes in pieces(model).items()}
    return Notes(found, mine, looks(model) != before, tuple(result))


def looks(model: fx.GraphModule) -> str:
    """Returns a graph as text, without annotations."""
    return "\n".join(node.format_node() or "" for node in model.graph.nodes)


def flat(node: fx.Node) -> list[Any]:
    """Returns the operands of a node, lists of them taken apart."""
    found: list[Any] = pytree.tree_leaves((node.args, node.kwargs))
    return found


def kind_of(node: fx.Node) -> str:
    """Returns an operator of ATen without overload and underscore."""
    return operator_name(node).rpartition("::")[2].rstrip("_")


def _asked(sharing: Sharing, point: Point) -> Asked:
    number = sharing.group_of[point]
    spec = sharing.groups[number].spec
    return Asked(None if spec is None else _numbers_of_spec(spec), number, repr(spec and observer_key(spec)))


def _numbers_of_spec(spec: QuantizationSpecBase) -> Numbers | None:
    asked: Any = spec
    if asked.dtype.is_floating_point:
        return None
    least, greatest = dtype_range(asked.dtype)
    by_channel = getattr(asked, "qscheme", None) in PER_CHANNEL
    low, high = getattr(asked, "quant_min", None), getattr(asked, "quant_max", None)
    return Numbers(
        asked.dtype, least if low is None else low, greatest if high is None else high,
        getattr(asked, "ch_axis", None) if by_channel else None, bool(getattr(asked, "is_dynamic", False)),
    )  # fmt: skip


def numbers_of(node: fx.Node) -> Numbers | None:
    """Returns the numbers of a dequantize node, None where it is of another kind than those of specs."""
    given, dtype = operands(node), stored_dtype(node)
    if dtype is None or not isinstance(given.get("quant_min"), int):
        return None
    return Numbers(dtype, given["quant_min"], given["quant_max"], given.get("axis"), is_dynamic(node))


class Noting(Quantizer):
    """A quantizer that does what another one does and keeps notes of its annotations.

    Attributes:
        notes: what it annotated last, None before that.
        problem: why that cannot be carried out, None where it can.

    Args:
        inner: the quantizer.
        inputs: what annotated graphs are run on.
        pieces: finds the nodes of each piece.
    """

    def __init__(self, inner: Quantizer, inputs: tuple[Any, ...], pieces: Pieces) -> None:
        self._inner, self._inputs, self._pieces = inner, inputs, pieces
        self.notes: Notes | None = None
        self.problem: AnnotationError | None = None

    def transform_for_annotation(self, model: fx.GraphModule) -> fx.GraphModule:
        """Lets the quantizer rewrite the graph."""
        transformed: fx.GraphModule = self._inner.transform_for_annotation(model)
        return transformed

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        """Lets it annotate the graph, and takes notes."""
        before = looks(model)
        annotated: fx.GraphModule = self._inner.annotate(model)
        try:
            self.notes = notes_of(annotated, before, self._inputs, self._pieces)
        except AnnotationError as error:
            self.problem = error
        return annotated

    def validate(self, model: fx.GraphModule) -> None:
        """Lets it look at its annotations."""
        self._inner.validate(model)

    def prepare_obs_or_fq_callback(self, model: Any, edge_or_node_to_obs_or_fq: Any) -> None:
        """Lets it look at its observers."""
        self._inner.prepare_obs_or_fq_callback(model, edge_or_node_to_obs_or_fq)


Signature = tuple[Any, ...]


def signature(operators: Iterable[Operator]) -> Signature:
    """Returns what is annotated at the operators of a piece, equal for equal annotations of graphs with other names."""
    groups: dict[int, int] = {}

    def plain(asked: Asked | None) -> Any:
        if asked is None:
            return None
        return asked.numbers, groups.setdefault(asked.group, len(groups)), asked.observer

    return tuple(
        (one.kind, tuple((i, plain(asked)) for i, asked in one.inputs.items()), plain(one.output)) for one in operators
    )
