"""The engine that carries annotators out: match, check, decide, then write.

Before: an exported graph, annotators in the order of their declaration, and a choice of config per node.
After: the same graph with a `QuantizationAnnotation` on every node that a rule took and a `Decision` on
every compute node. Annotators are pure: only `annotate` writes to the graph, and only after every
decision has been made, so an error leaves the graph as it was.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType

from torch import fx
from torchao.quantization.pt2e.quantizer import QuantizationConfig
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from quantplug.core.annotation.annotator import Annotations, Annotator, Choice, Filter, Piece
from quantplug.core.annotation.claims import Claims
from quantplug.core.annotation.configs import Configs, stays_float
from quantplug.core.annotation.fixed_qparams import inherit_fixed
from quantplug.core.annotation.kernel_dtypes import KernelDtypes
from quantplug.core.annotation.objections import (
    contradiction,
    float_producer,
    not_float32,
    quantizes_nothing,
    require_inside,
)
from quantplug.core.annotation.surroundings import Surroundings
from quantplug.core.annotation.worth import leave_float
from quantplug.core.errors import AnnotationError
from quantplug.core.graph.facts import describe, require_graph_module
from quantplug.core.graph.meta import CLAIM, VIOLATIONS
from quantplug.core.patterns.matching import Findings, PatternIndex
from quantplug.core.specs.decision import Decision, record
from quantplug.core.specs.limits import Violation


def annotate_with(
    model: fx.GraphModule,
    annotators: Iterable[Annotator],
    config: QuantizationConfig,
    filter_fn: Filter | None = None,
) -> list[list[fx.Node]]:
    """Annotates a graph with some annotators, inside anybody's Quantizer.

    Args:
        model: an exported graph; what is annotated already stays as it is.
        annotators: the largest matched piece wins, then their order.
        config: what to quantize to.
        filter_fn: the nodes that may be quantized; all of them by default.

    Returns:
        The pieces that were annotated, each with its last node first.

    Raises:
        ModelError: the model is no exported graph module.
        AnnotationError: an annotator decided about a node outside of its piece; the graph is unchanged.
    """
    declared = tuple(annotators)
    owner = ", ".join(annotator.name for annotator in declared)
    choice, outside = Choice(config, f"annotator '{owner}'", 1), Choice(None, "the filter", 1)
    graph = require_graph_module(model, "annotate_with")
    found = annotate(graph, declared, lambda node: choice if not filter_fn or filter_fn(node) else outside, owner)
    return [list(piece.match.nodes) for piece in found]


def annotate(
    model: fx.GraphModule,
    annotators: tuple[Annotator, ...],
    choose: Callable[[fx.Node], Choice],
    owner: str,
    *,
    strict: bool = True,
    without: Mapping[str, str] = MappingProxyType({}),
) -> list[Piece]:
    """Annotates a graph: match, check, decide, then write.

    Args:
        model: an exported graph; its nodes get annotations and decisions.
        annotators: tried largest matched piece first, then in this order.
        choose: the config of a node.
        owner: the backend's name, for the report.
        strict: whether a spec that breaks a limit of the kernels is an error; if not, the operator stays
            float and the report says why.
        without: why the backend has no rule for an operator, by its name in ATen, for the report.

    Returns:
        The pieces that were annotated, in graph order.

    Raises:
        AnnotationError: an annotator decided about a node outside of its piece, or, if strict, a config
            breaks a limit; the graph is unchanged.
    """
    surroundings = Surroundings(model)
    configs, dtypes = Configs(choose), KernelDtypes(owner, surroundings)
    claims = Claims(surroundings.ends)
    engine = _Engine(configs, surroundings, dtypes, claims)
    index = PatternIndex(((a, label, pattern) for a in annotators for label, pattern in a.patterns), without)
    findings = index.find(model.graph, engine.objection)
    taken = [piece for piece in findings.found if engine.carry_out(piece)]
    leave_float(taken, claims, configs, surroundings)
    inherit_fixed(claims, dtypes)
    decisions = [*_of_pieces(findings, engine, owner), *_of_others(findings, configs, owner)]
    violations = dtypes.unresolved(claims)
    if strict:
        _require_none(violations)
    # From here on nothing can fail.
    for node, annotation in claims.annotations.items():
        node.meta[Q_ANNOTATION_KEY] = annotation
    for node, decided in decisions:
        record(node, decided)
    carried_out = [piece for piece in taken if piece in claims]
    for piece in carried_out:
        dtypes.leave_limits(piece, strict)
    violations += dtypes.beyond_pairs(carried_out, claims)
    if violations:
        VIOLATIONS.put(model, (*VIOLATIONS.get(model, ()), *violations))
    return carried_out


def _require_none(violations: list[Violation]) -> None:
    if violations:
        more = f" ({len(violations) - 1} more like it.)" if len(violations) > 1 else ""
        raise AnnotationError(f"{violations[0]}{more}")


class _Engine:
    """Asks each rule about its pieces, and takes those against which nothing speaks."""

    def __init__(self, configs: Configs, surroundings: Surroundings, dtypes: KernelDtypes, claims: Claims) -> None:
        self.configs = configs
        self.dtypes = dtypes
        self.claims = claims
        self._surroundings = surroundings
        self._decided: dict[Piece, Annotations] = {}

    def objection(self, piece: Piece) -> str | None:
        """Returns the first reason against a match, or None."""
        taken = next((n for n in piece.match.nodes if Q_ANNOTATION_KEY in n.meta), None)
        if taken is not None:
            return f"{describe(taken)} {CLAIM.get(taken, 'is already annotated by another quantizer')}"
        choice = self.configs.of(piece.match["op"])
        if choice.config is None:
            return stays_float(choice)
        config = choice.config
        checks: Iterator[str | None] = (check(piece.match, config) for check in piece.owner.constraints)
        return (
            self.configs.disagreement(piece.match)
            or self._surroundings.mutation(piece.match)
            or (None if choice.is_named else self._surroundings.position(piece))
            or next(filter(None, checks), None)
            or (self.dtypes.select(piece, self._decide(piece, config)) if piece.owner.dtypes else None)
        )

    def _decide(self, piece: Piece, config: QuantizationConfig) -> Annotations:
        """Returns what a rule decides about a match; it is asked once."""
        if piece not in self._decided:
            self._decided[piece] = piece.owner.decide(piece.match, config)
        return self._decided[piece]

    def carry_out(self, piece: Piece) -> bool:
        """Takes an accepted match; false if there is still a reason against it."""
        config = self.configs.of(piece.match["op"]).config
        assert config is not None  # objection() refused every match without one
        reason = float_producer(piece, self.claims)
        decided = {} if reason else self._decide(piece, config)
        require_inside(piece, decided)
        reason = reason or quantizes_nothing(decided) or not_float32(decided)
        reason = reason or contradiction(decided, self.claims, self._surroundings)
        reason = reason or self.dtypes.shared_refusal(piece, decided, self.claims)
        if reason:
            self.claims.refuse(piece, reason)
        else:
            self.claims.take(piece, decided)
        return not reason


def _of_pieces(findings: Findings[Annotator], engine: _Engine, owner: str) -> Iterator[tuple[fx.Node, Decision]]:
    for piece in findings.found:
        config, selection = engine.configs.of(piece.match["op"]).scope, engine.dtypes.selection(piece)
        dtypes, passed_over = selection.chosen.name if selection.chosen else "", "; ".join(selection.passed_over)
        taken = Decision(owner, piece.label, piece.match.root.name, config, dtypes=dtypes, passed_over=passed_over)
        refused = engine.claims.refused.get(piece.match.root)
        for node in piece.match.nodes:
            if refused is None:
                yield node, taken
            else:
                near = max(refused, findings.also.get(node, refused), key=lambda miss: miss.matched)
                yield node, Decision(owner, root=node.name, config=config, nearest=near.label, reason=near.reason)


def _of_others(findings: Findings[Annotator], configs: Configs, owner: str) -> Iterator[tuple[fx.Node, Decision]]:
    for node, miss in findings.misses.items():
        choice = configs.of(node)
        if choice.config is None:
            yield node, Decision(owner, root=node.name, config=choice.scope, reason=stays_float(choice))
        else:
            yield node, Decision(owner, root=node.name, config=choice.scope, nearest=miss.label, reason=miss.reason)
