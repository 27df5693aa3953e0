"""Annotators and the engine that carries them out.

Before: an exported graph, annotators in the order of their declaration, and a choice of config per node.
After: the same graph with a `QuantizationAnnotation` on every node that a rule took and a `Decision` on
every compute node. Annotators are pure: only `annotate` writes to the graph, and only after every
decision has been made, so an error leaves the graph as it was.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias, overload

import torch
from torch import fx
from torchao.quantization.pt2e.quantizer import (
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    QuantizationConfig,
    QuantizationSpec,
    QuantizationSpecBase,
    SharedQuantizationSpec,
)
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from quantplug.core.aliases import changed_under_other_names
from quantplug.core.decision import Decision, record
from quantplug.core.errors import AnnotationError, PatternError
from quantplug.core.graph import describe, is_constant, tensor_value
from quantplug.core.matching import Findings, Found, NearMiss, PatternIndex
from quantplug.core.pattern import Match, Op, Pattern
from quantplug.core.specs import spec_value

Annotations: TypeAlias = dict[fx.Node, QuantizationAnnotation]
Decide: TypeAlias = Callable[[Match, QuantizationConfig], Annotations]
Constraint: TypeAlias = Callable[[Match, QuantizationConfig], str | None]
Filter: TypeAlias = Callable[[fx.Node], bool]


@dataclass(frozen=True)
class Choice:
    """The config that applies to a node.

    Attributes:
        config: the config, or None for float.
        scope: which scope chose it, in words ("" if none covers the node).
        precedence: how specific that scope is; 0 if none covers the node.
    """

    config: QuantizationConfig | None = None
    scope: str = ""
    precedence: int = 0


@dataclass(frozen=True)
class Annotator:
    """How one operator family is quantized.

    Attributes:
        name: the family, as reports show it.
        patterns: (label, pattern) pairs; every pattern binds the operator that the family is about to "op".
        decide: the pure function from a match and a config to annotations.
        constraints: predicates over a match and a config, each None or the reason against it.
        follows: names of captures whose producers must already be quantized: an operator that only
            moves data keeps the integer domain between quantized neighbours and starts none.
        output: where the scale of the output comes from: an observer of its "own", "shared" with the
            input, "fixed" beforehand, or none because the output stays "float". It describes `decide`
            in capability tables and has no effect of its own.
        writes_float: whether the kernel can as well write float. Then its output is quantized only where
            a quantized operator reads it: rounding it for a float reader would cost accuracy and time.
    """

    name: str
    patterns: tuple[tuple[str, Pattern], ...]
    decide: Decide
    constraints: tuple[Constraint, ...] = ()
    follows: tuple[str, ...] = ()
    output: str = "own"
    writes_float: bool = False

    def __post_init__(self) -> None:
        for label, pattern in self.patterns:
            if "op" not in _bound_names(pattern):
                raise PatternError(
                    f"Pattern '{label}' of annotator '{self.name}' binds no operator to 'op'; "
                    "give the operator that the family is about name='op'."
                )

    def where(self, *constraints: Constraint) -> "Annotator":
        """Returns the same annotator with further constraints, each None or the reason against a match."""
        return replace(self, constraints=self.constraints + constraints)

    def writing_float(self) -> "Annotator":
        """Returns the same annotator for kernels that can as well write float."""
        return replace(self, writes_float=True)

    @overload
    def __call__(self, target: Match, config: QuantizationConfig) -> Annotations: ...

    @overload
    def __call__(
        self, target: fx.GraphModule, config: QuantizationConfig, filter_fn: Filter | None = None
    ) -> list[list[fx.Node]]: ...

    def __call__(
        self, target: Match | fx.GraphModule, config: QuantizationConfig, filter_fn: Filter | None = None
    ) -> Annotations | list[list[fx.Node]]:
        """Decides about one match, or annotates a graph on its own inside anybody's Quantizer.

        Args:
            target: a match, for which nothing is written; or a graph module, which is annotated.
            config: what to quantize to.
            filter_fn: for a graph module, the nodes that may be quantized; all of them by default.

        Returns:
            The annotations of the match; or for a graph module the matched pieces, the last node first.
        """
        if isinstance(target, Match):
            return self.decide(target, config)
        choice, outside = Choice(config, f"annotator '{self.name}'", 1), Choice(None, "the filter", 1)
        outcome = annotate(target, (self,), lambda n: choice if not filter_fn or filter_fn(n) else outside, self.name)
        return [list(found.match.nodes) for found in outcome]


def _bound_names(pattern: Pattern) -> set[str]:
    own = {pattern.name} if isinstance(pattern, Op) and pattern.name else set()
    return own.union(*(_bound_names(part) for part in pattern.parts))


def annotate(
    model: fx.GraphModule,
    annotators: tuple[Annotator, ...],
    choose: Callable[[fx.Node], Choice],
    owner: str,
) -> list[Found[Annotator]]:
    """Annotates a graph: match, check, decide, then write.

    Args:
        model: an exported graph; its nodes get annotations and decisions.
        annotators: tried largest matched piece first, then in this order.
        choose: the config of a node.
        owner: the backend's name, for the report.

    Returns:
        The pieces that were annotated, in graph order.

    Raises:
        AnnotationError: an annotator decided about a node outside of its piece; the graph is unchanged.
    """
    work = _Decisions(choose, changed_under_other_names(model.graph))
    index = PatternIndex((a, label, pattern) for a in annotators for label, pattern in a.patterns)
    findings = index.find(model.graph, work.accept)
    carried_out = [found for found in findings.found if work.carry_out(found)]
    for found in reversed(carried_out):
        work.release_output(found)
    carried_out = [found for found in carried_out if found.match.root in work.annotations]
    work.inherit_fixed()
    decisions = list(_decisions(findings, work, owner))
    # From here on nothing can fail.
    for node, annotation in work.annotations.items():
        node.meta[Q_ANNOTATION_KEY] = annotation
    for node, decided in decisions:
        record(node, decided)
    return carried_out


@dataclass
class _Decisions:
    choose: Callable[[fx.Node], Choice]
    changed: Mapping[fx.Node, fx.Node]
    annotations: Annotations = field(default_factory=dict)
    rejected: dict[fx.Node, NearMiss] = field(default_factory=dict)
    chosen: dict[fx.Node, Choice] = field(default_factory=dict)

    def accept(self, found: Found[Annotator]) -> str | None:
        """Returns the first reason against a match, or None."""
        taken = next((n for n in found.match.nodes if Q_ANNOTATION_KEY in n.meta), None)
        if taken is not None:
            return f"{describe(taken)} is already annotated by another quantizer"
        choice = self._choice(found.match["op"])
        if choice.config is None:
            return _stays_float(choice)
        config = choice.config
        checks: Iterator[str | None] = (check(found.match, config) for check in found.owner.constraints)
        return (
            self._disagreement(found.match, choice) or self._mutation(found.match) or next(filter(None, checks), None)
        )

    def _choice(self, node: fx.Node) -> Choice:
        if node not in self.chosen:
            self.chosen[node] = self.choose(node)
        return self.chosen[node]

    def _disagreement(self, match: Match, choice: Choice) -> str | None:
        """All nodes of a piece share one config; a scope less specific than the operator's gives way."""
        for node in match.nodes:
            other = self._choice(node)
            if other.precedence and other.precedence >= choice.precedence and not _same(other.config, choice.config):
                return (
                    f"{describe(match['op'])} has its config by {choice.scope}, "
                    f"{describe(node)} another by {other.scope}"
                )
        return None

    def _mutation(self, match: Match) -> str | None:
        """A quantize/dequantize pair is a copy: it would hide a change in place from a later reader."""
        for node in match.nodes:
            for touched in (node, *node.all_input_nodes):
                if touched in self.changed:
                    return (
                        f"{describe(self.changed[touched])} changes the tensor of {describe(touched)} in place, "
                        "which is read afterwards"
                    )
        return None

    def carry_out(self, found: Found[Annotator]) -> bool:
        """Merges the annotations of an accepted match; false if there is still a reason against it."""
        config = self._choice(found.match["op"]).config
        assert config is not None  # accept() refused every match without one
        reason = self._float_producer(found)
        decided = {} if reason else found.owner.decide(found.match, config)
        reason = reason or _not_float32(decided)
        if reason:
            self.rejected[found.match.root] = NearMiss(found.label, reason, len(found.match.nodes))
            return False
        self._merge(found, decided)
        return True

    def _float_producer(self, found: Found[Annotator]) -> str | None:
        for name in found.owner.follows:
            producer = found.match[name]
            if not self._is_quantized(producer):
                return f"operand '{name}' comes from {describe(producer)}, which is float"
        return None

    def _merge(self, found: Found[Annotator], decided: Annotations) -> None:
        outside = next((node for node in decided if node not in found.match.nodes), None)
        if outside is not None:
            raise AnnotationError(
                f"Rule '{found.label}' annotates {describe(outside)}, which is not part of the piece that it matched; "
                "let it return annotations of matched nodes only."
            )
        for node in found.match.nodes:
            self.annotations[node] = decided.get(node) or QuantizationAnnotation()
            self.annotations[node]._annotated = True

    def release_output(self, found: Found[Annotator]) -> None:
        """Leaves the output of a kernel that can write float in float if only float operators read it.

        Called from the last piece to the first: a move that nobody reads in integers goes too.
        """
        root = found.match.root
        if not found.owner.writes_float or any(self._reads(user, root) for user in root.users):
            return
        if found.owner.follows:
            del self.annotations[root]
            self.rejected[root] = NearMiss(found.label, "only float operators read its result", 1)
        else:
            self.annotations[root].output_qspec = None

    def _reads(self, user: fx.Node, source: fx.Node) -> bool:
        annotation = self.annotations.get(user) or user.meta.get(Q_ANNOTATION_KEY)
        return annotation is not None and source in annotation.input_qspec_map

    def _output_spec(self, node: fx.Node) -> QuantizationSpecBase | None:
        annotation = self.annotations.get(node) or node.meta.get(Q_ANNOTATION_KEY)
        return annotation.output_qspec if annotation is not None else None

    def _is_quantized(self, node: fx.Node) -> bool:
        return self._output_spec(node) is not None

    def inherit_fixed(self) -> None:
        """Lets input edges take over the fixed qparams of their producer.

        Without it the tensor would be quantized twice, once fixed and once observed, and every such edge
        would cost a requantization in the kernel graph. An edge that other inputs share keeps its own
        spec: the fixed range of one input need not hold for the others.
        """
        for node, annotation in self.annotations.items():
            shared = _shared_inputs(node, annotation.input_qspec_map)
            for source, spec in annotation.input_qspec_map.items():
                fixed = self._root_spec(source)
                if (
                    isinstance(spec, QuantizationSpec)
                    and isinstance(fixed, FixedQParamsQuantizationSpec)
                    and not spec.is_dynamic
                    and _integers(fixed) == _integers(spec)
                    and source not in shared
                ):
                    annotation.input_qspec_map[source] = SharedQuantizationSpec(source)

    def _root_spec(self, node: fx.Node) -> QuantizationSpecBase | None:
        seen: set[object] = set()
        place: object = node
        while place not in seen:
            seen.add(place)
            spec = self._spec_at(place)
            if not isinstance(spec, SharedQuantizationSpec):
                return spec
            place = spec.edge_or_node
        return None

    def _spec_at(self, place: object) -> QuantizationSpecBase | None:
        if isinstance(place, fx.Node):
            return self._output_spec(place)
        assert isinstance(place, tuple)
        source, user = place
        annotation = self.annotations.get(user) or user.meta.get(Q_ANNOTATION_KEY)
        return annotation.input_qspec_map.get(source) if annotation is not None else None


def _shared_inputs(node: fx.Node, specs: Mapping[fx.Node, QuantizationSpecBase | None]) -> set[fx.Node]:
    edges = (spec.edge_or_node for spec in specs.values() if isinstance(spec, SharedQuantizationSpec))
    return {edge[0] for edge in edges if isinstance(edge, tuple) and edge[1] is node}


def _integers(spec: QuantizationSpec | FixedQParamsQuantizationSpec) -> tuple[torch.dtype, float, float]:
    limits = torch.iinfo(spec.dtype) if not spec.dtype.is_floating_point else torch.finfo(spec.dtype)
    low = limits.min if spec.quant_min is None else spec.quant_min
    high = limits.max if spec.quant_max is None else spec.quant_max
    return spec.dtype, low, high


def _same(one: QuantizationConfig | None, other: QuantizationConfig | None) -> bool:
    """Whether two configs ask for the same; torchao's equality compares observer constructors by identity."""
    if one is None or other is None:
        return one is other
    return all(map(_same_spec, vars(one).values(), vars(other).values()))


def _same_spec(one: object, other: object) -> bool:
    if not isinstance(one, QuantizationSpec) or not isinstance(other, QuantizationSpec):
        return bool(one == other)
    try:
        return bool(one == other) or spec_value(one, str) == spec_value(other, str)
    except AnnotationError:  # an observer constructor without a name, such as a lambda
        return False


def _not_float32(annotations: Annotations) -> str | None:
    for node, annotation in annotations.items():
        for source in annotation.input_qspec_map:
            found = tensor_value(source)
            if found is not None and found.dtype != torch.float32:
                kind = "constant" if is_constant(source) else "operand"
                return f"{kind} {describe(source)} of '{node.name}' is {found.dtype}, not torch.float32"
    return None


def _stays_float(choice: Choice) -> str:
    return f"set to float by {choice.scope}" if choice.precedence else "no config scope covers it"


def _decisions(findings: Findings[Annotator], work: _Decisions, owner: str) -> Iterator[tuple[fx.Node, Decision]]:
    for found in findings.found:
        scope = work._choice(found.match["op"]).scope
        refused = work.rejected.get(found.match.root)
        for node in found.match.nodes:
            if refused is None:
                yield node, Decision(owner, rule=found.label, root=found.match.root.name, config=scope)
            else:
                near = max(refused, findings.also.get(node, refused), key=lambda miss: miss.matched)
                yield node, Decision(owner, root=node.name, config=scope, nearest=near.label, reason=near.reason)
    for node, miss in findings.misses.items():
        choice = work._choice(node)
        if choice.config is None:
            yield node, Decision(owner, root=node.name, config=choice.scope, reason=_stays_float(choice))
        else:
            yield node, Decision(owner, root=node.name, config=choice.scope, nearest=miss.label, reason=miss.reason)
