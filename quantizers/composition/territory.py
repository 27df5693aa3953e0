"""Lets one quantizer of several annotate its part of a graph, and nothing else.

Before: a graph, the nodes that a quantizer may annotate, and what others have annotated. After: what the
quantizer wrote inside of its part, and in words what it tried outside. Nothing stays on the graph.

A quantizer keeps off nodes that carry an annotation. So every node that is not its own carries a stand-in
while it works: an annotation of the class that it writes itself (torchao's x86 quantizer asserts its own), with
the specs of whoever annotated the node, or none. Stand-ins are copies: what happens to them harms nobody.
"""

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import fx
from torchao.quantization.pt2e.quantizer import (
    DerivedQuantizationSpec,
    QuantizationAnnotation,
    Quantizer,
    SharedQuantizationSpec,
)
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from quantplug.core.graph.facts import describe, is_constant
from quantplug.core.graph.meta import CLAIM, DECISION, LIMITS
from quantplug.core.graph.union_find import UnionFind
from quantplug.core.peers.torchao_names import is_marked
from quantplug.core.specs.decision import Decision, decision
from quantplug.core.specs.limits import Limits
from quantplug.quantizers.framework.quantizer import BackendQuantizer

Annotations: TypeAlias = dict[fx.Node, QuantizationAnnotation]


@dataclass(frozen=True)
class Claim:
    """A node's annotation, the name of the quantizer that made it, and what its kernel asks of the numbers."""

    owner: str
    annotation: QuantizationAnnotation
    limits: Limits | None = None


@dataclass(frozen=True)
class Outcome:
    """What a quantizer did in its part of a graph.

    Attributes:
        pieces: the annotations that it wrote there, one mapping for each fused piece.
        decisions: what it says about the nodes there.
        limits: what its kernels ask of the numbers of the nodes that it annotated.
        refused: nodes of pieces that it wrote across the border of its part, each with the reason.
        overlaps: nodes of other quantizers in its part that it annotated as well.
        tampered: nodes of other quantizers whose annotation it changed or removed.
    """

    pieces: tuple[Annotations, ...]
    decisions: Mapping[fx.Node, Decision]
    limits: Mapping[fx.Node, Limits]
    refused: Mapping[fx.Node, str]
    overlaps: tuple[fx.Node, ...]
    tampered: tuple[fx.Node, ...]


def annotate_inside(
    quantizer: Quantizer, model: fx.GraphModule, inside: Set[fx.Node], claims: Mapping[fx.Node, Claim], region: str
) -> Outcome:
    """Lets a quantizer annotate a graph.

    Args:
        quantizer: anybody's. One that is not ours is asked a second time if there is anything to keep it off.
        model: the graph, without annotations and decisions.
        inside: the nodes that the quantizer may annotate unless they are claimed.
        claims: what other quantizers have annotated.
        region: how reasons name the part inside.
    """
    kind = QuantizationAnnotation
    if not isinstance(quantizer, BackendQuantizer):
        free = _attempt(quantizer, model, {})
        if not claims and free.written.keys() <= inside:
            return free.outcome(claims, inside)
        kind = next((type(found) for found in free.written.values()), kind)
    outside = {node: f"is outside of its region, {region}" for node in model.graph.nodes if node not in inside}
    taken = {node: f"is already annotated by '{claim.owner}'" for node, claim in claims.items()}
    stand_ins = {node: _stand_in(kind, claims.get(node), text) for node, text in (outside | taken).items()}
    return _attempt(quantizer, model, stand_ins).outcome(claims, inside)


@dataclass(frozen=True)
class _StandIn:
    annotation: QuantizationAnnotation
    before: tuple[Any, ...]
    text: str


def _stand_in(kind: Callable[..., QuantizationAnnotation], claim: Claim | None, text: str) -> _StandIn:
    annotation = kind(_annotated=True)
    if claim is not None:
        annotation.input_qspec_map = dict(claim.annotation.input_qspec_map or {})
        annotation.output_qspec = claim.annotation.output_qspec
        annotation.allow_implicit_sharing = claim.annotation.allow_implicit_sharing
    return _StandIn(annotation, _contents(annotation), text)


def _contents(annotation: QuantizationAnnotation) -> tuple[Any, ...]:
    """What an annotation says; specs cannot change, so their identity stands for them."""
    inputs = tuple((node, id(spec)) for node, spec in (annotation.input_qspec_map or {}).items())
    return inputs, id(annotation.output_qspec), annotation.allow_implicit_sharing, is_marked(annotation)


@dataclass(frozen=True)
class _Attempt:
    """What a quantizer left on a graph that carried stand-ins."""

    written: Annotations
    decisions: dict[fx.Node, Decision]
    limits: dict[fx.Node, Limits]
    stand_ins: Mapping[fx.Node, _StandIn]
    changed: tuple[fx.Node, ...]

    def outcome(self, claims: Mapping[fx.Node, Claim], inside: Set[fx.Node]) -> Outcome:
        kept, refused = _kept(_pieces(self.written), self.written, self.stand_ins, claims)
        return Outcome(
            pieces=tuple({node: self.written[node] for node in piece} for piece in kept),
            decisions={n: d for n, d in self.decisions.items() if n not in self.stand_ins},
            limits=self.limits,
            refused={n: text for n, text in refused.items() if n not in self.stand_ins},
            overlaps=tuple(n for n in self.written if n in claims and n in inside),
            tampered=tuple(n for n in self.changed if n in claims),
        )


def _attempt(quantizer: Quantizer, model: fx.GraphModule, stand_ins: Mapping[fx.Node, _StandIn]) -> _Attempt:
    """Runs a quantizer on a graph that carries stand-ins only, and takes off what it wrote."""
    for node, placed in stand_ins.items():
        node.meta[Q_ANNOTATION_KEY] = placed.annotation
        CLAIM.put(node, placed.text)
    quantizer.annotate(model)
    written: Annotations = {}
    changed: list[fx.Node] = []
    limits = {node: limited for node in model.graph.nodes if (limited := LIMITS.drop(node)) is not None}
    decisions = {node: found for node in model.graph.nodes if (found := decision(node)) is not None}
    for node in model.graph.nodes:
        found, stand_in = node.meta.pop(Q_ANNOTATION_KEY, None), stand_ins.get(node)
        CLAIM.drop(node)
        DECISION.drop(node)
        if stand_in is not None and (found is None or found is stand_in.annotation):
            if found is None or _contents(found) != stand_in.before:
                changed.append(node)
        elif found is not None:
            written[node] = found
    return _Attempt(written, decisions, limits, stand_ins, tuple(changed))


def _pieces(written: Annotations) -> list[list[fx.Node]]:
    """Returns what was annotated, cut where tensors are quantized: between them nodes run as one kernel."""
    connected = UnionFind(written)
    for node in written:
        for source in node.all_input_nodes:
            if source in written and not _quantized_between(source, node, written):
                connected.join(source, node)
    return connected.groups()


def _quantized_between(source: fx.Node, node: fx.Node, written: Annotations) -> bool:
    specs = {read: spec for read, spec in (written[node].input_qspec_map or {}).items() if spec is not None}
    # An operator with a weight of its own begins a kernel, even where its input stays float.
    return source in specs or written[source].output_qspec is not None or any(map(is_constant, specs))


def _kept(
    pieces: list[list[fx.Node]],
    written: Annotations,
    stand_ins: Mapping[fx.Node, _StandIn],
    claims: Mapping[fx.Node, Claim],
) -> tuple[list[list[fx.Node]], dict[fx.Node, str]]:
    """Returns the pieces that lie inside as a whole and refer to nothing outside; and why the others go."""
    refused: dict[fx.Node, str] = {}
    known = written.keys() | claims.keys()
    before = -1
    while len(refused) > before:
        before = len(refused)
        for piece in (piece for piece in pieces if piece[0] not in refused):
            stuck = next((n for n in piece if n in stand_ins), None) or next(
                (n for n in _referred(piece, written) if n in refused or n not in known), None
            )
            if stuck is not None:
                text = stand_ins[stuck].text if stuck in stand_ins else "is not annotated"
                refused |= dict.fromkeys(piece, f"its annotation needs {describe(stuck)}, which {text}")
    return [piece for piece in pieces if piece[0] not in refused], refused


def _referred(piece: list[fx.Node], written: Annotations) -> Iterator[fx.Node]:
    """Yields the nodes that hold the annotations which those of a piece share or derive theirs from."""
    for node in piece:
        for spec in (*(written[node].input_qspec_map or {}).values(), written[node].output_qspec):
            points = [spec.edge_or_node] if isinstance(spec, SharedQuantizationSpec) else []
            points += spec.derived_from if isinstance(spec, DerivedQuantizationSpec) else []
            yield from (point[1] if isinstance(point, tuple) else point for point in points)
