"""What the quantizers of a composition decide about one graph, gathered before anything is written.

Before: a graph, and quantizers in the order in which they annotate it. After: the graph with one annotation a
node, decisions that name the quantizer, and notes about what quantizers did to each other.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from torch import fx
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from quantplug.core.errors import AnnotationError
from quantplug.core.graph.facts import compute_nodes, describe
from quantplug.core.graph.meta import DECISION, LIMITS, NOTES, SUBMODEL, VIOLATIONS
from quantplug.core.observers.sharing import annotation_of
from quantplug.core.specs.decision import Decision, decision
from quantplug.quantizers.composition.members import Member
from quantplug.quantizers.composition.precedence import Place
from quantplug.quantizers.composition.territory import Annotations, Claim, Outcome, annotate_inside


def compose(model: fx.GraphModule, places: Iterable[Place], strict: bool, notes: Iterable[str]) -> None:
    """Annotates a graph with the quantizers of a composition; if one fails, the graph is as it was.

    Args:
        model: the graph.
        places: the quantizers with their nodes, in the order in which they annotate.
        strict: whether a change of another quantizer's annotation is an error.
        notes: what was noted before.

    Raises:
        AnnotationError: if strict, a quantizer changed another's annotation.
    """
    before = [(node.meta, dict(node.meta)) for node in model.graph.nodes] + [(model.meta, dict(model.meta))]
    try:
        draft = _Draft(model, strict, list(notes))
        for place in places:
            draft.annotate(place)
    except Exception:
        for owner, meta in before:
            owner.clear()
            owner.update(meta)
        raise
    draft.write()


@dataclass
class _Draft:
    """What the members have decided so far; nothing of it is on the graph before `write`."""

    model: fx.GraphModule
    strict: bool
    notes: list[str]
    claims: dict[fx.Node, Claim] = field(default_factory=dict)
    taken: dict[fx.Node, Decision] = field(default_factory=dict)
    left: dict[fx.Node, list[Decision]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in self.model.graph.nodes:
            annotation, decided, limits = annotation_of(node), decision(node), LIMITS.drop(node)
            if annotation is not None:
                self.claims[node] = Claim(decided.owner if decided else "an earlier quantizer", annotation, limits)
                if decided:
                    self.taken[node] = decided
            node.meta.pop(Q_ANNOTATION_KEY, None)
            DECISION.drop(node)

    def annotate(self, place: Place) -> None:
        """Lets a member annotate its place."""
        member = place.member
        outcome = annotate_inside(member.quantizer, self.model, place.inside, self.claims, member.region.text)
        self._report(member, outcome)
        for piece in outcome.pieces:
            self._take(member, piece, outcome)
        for node in place.operators - self.claims.keys():
            decided = outcome.decisions.get(node, _float(member, outcome, node))
            self.left.setdefault(node, []).append(_in_region(decided, member))

    def _take(self, member: Member, piece: Annotations, outcome: Outcome) -> None:
        root = list(piece)[-1].name
        quantized = any(map(_quantizes, piece.values()))
        for node, annotation in piece.items():
            told = Decision(member.name, "annotated", root) if quantized else _float(member, outcome, node)
            self.claims[node] = Claim(member.name, annotation, outcome.limits.get(node))
            self.taken[node] = _in_region(outcome.decisions.get(node, told), member)

    def _report(self, member: Member, outcome: Outcome) -> None:
        for node in outcome.tampered:
            text = (
                f"Quantizer '{member.name}' changed or removed the annotation of {describe(node)}, "
                f"which '{self.claims[node].owner}' made"
            )
            if self.strict:
                raise AnnotationError(f"{text}; mend that quantizer or pass strict=False to drop what it changed.")
            self.notes.append(f"{text}; that was dropped.")
        for node in outcome.overlaps:
            self.notes.append(
                f"Quantizer '{member.name}' annotates {describe(node)} as well, which is already annotated by "
                f"'{self.claims[node].owner}', whose precedence is greater; its piece there was dropped."
            )
        if not outcome.pieces and not SUBMODEL.get(self.model):
            self.notes.append(f"Quantizer '{member.name}' annotated nothing in {member.region.text}.")

    def write(self) -> None:
        """Writes everything to the graph."""
        for node, claim in self.claims.items():
            node.meta[Q_ANNOTATION_KEY] = claim.annotation
            if claim.limits is not None:
                LIMITS.put(node, claim.limits)
        for node, decided in self.taken.items():
            DECISION.put(node, decided)
        for node in compute_nodes(self.model.graph):
            if node not in self.claims:
                DECISION.put(node, _together(node, self.left.get(node, [])))
        taken = {node.name for node in self.claims}
        violations = tuple(v for v in VIOLATIONS.get(self.model, ()) if v.node not in taken)
        if violations or VIOLATIONS.on(self.model):
            VIOLATIONS.put(self.model, violations)
        NOTES.put(self.model, (*NOTES.get(self.model, ()), *self.notes))


def _quantizes(annotation: QuantizationAnnotation) -> bool:
    specs = (*(annotation.input_qspec_map or {}).values(), annotation.output_qspec)
    return any(spec is not None for spec in specs)


def _float(member: Member, outcome: Outcome, node: fx.Node) -> Decision:
    return Decision(member.name, root=node.name, reason=outcome.refused.get(node, "the quantizer leaves it float"))


def _in_region(decided: Decision, member: Member) -> Decision:
    scopes = filter(None, (decided.config, f"in {member.region.text}"))
    return replace(decided, owner=member.name, config=" ".join(scopes))


def _together(node: fx.Node, decisions: list[Decision]) -> Decision:
    """Returns why a node stays float, in the words of every quantizer that could have taken it."""
    if not decisions:
        return Decision("", root=node.name, reason="no quantizer of the composition covers it")
    if len(decisions) == 1:
        return decisions[0]
    nearest = (f"nearest rule '{d.nearest}': " if d.nearest else "" for d in decisions)
    reasons = (f"'{d.owner}': {near}{d.reason}" for d, near in zip(decisions, nearest, strict=True))
    return replace(decisions[0], nearest="", reason="; ".join(reasons))
